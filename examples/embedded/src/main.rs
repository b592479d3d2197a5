//! `sterna-embedded receive ADDRESS` waits for a guest; `sterna-embedded send ADDRESS` boots one and moves it there.

use std::env::args;
use std::error::Error;

use sterna::vm_memory::BitmapLog;
use sterna::{Cancel, Destination, Security, Source};
use sterna_embedded::Machine;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = args().skip(1).collect();
    let mut machine = Machine::new()?;
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["send", to] => {
            machine.run();
            machine.wait_for(5000);
            let mut source = Source::new(machine.ram()?, Box::new(BitmapLog::new(&machine.memory)?));
            let report = source.run(to, &Security::Insecure, &mut machine, &Cancel::new(), &())?;
            println!("{}", report.text());
        }
        ["receive", at] => {
            let listening = Destination::new(machine.ram()?).listen(at, &Security::Insecure)?;
            println!("listening on {}", listening.address());
            listening.run(&mut machine, &Cancel::new(), &())?;
            machine.wait_for(5000);
            machine.halt();
            println!("verified {} pages after {} steps", machine.verify()?, machine.steps());
        }
        _ => return Err("usage: sterna-embedded send ADDRESS | receive ADDRESS".into()),
    }
    Ok(())
}
