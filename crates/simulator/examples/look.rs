//! Prints runs.
use sterna_simulator::host::run;
use sterna_simulator::scenario::*;
fn main() {
    for (cores, normal, n, devices) in [
        (192usize, 500, 100usize, 4usize),
        (4, 500, 100, 4),
        (192, 0, 100, 1),
        (192, 0, 100, 4),
        (4, 0, 100, 1),
        (4, 0, 100, 4),
        (192, 0, 1, 1),
    ] {
        println!("cores {cores} normal {normal} vms {n} devices {devices}");
        let go = |name: &str, f: &dyn Fn(&mut Scenario)| {
            let mut s = Scenario::of(vec![Vm { normal_per_mille: normal, ..Vm::gib(1) }; n]);
            s.cores = cores;
            s.devices = devices;
            f(&mut s);
            let t = std::time::Instant::now();
            let o = run(&s);
            let on: u64 = o.vms.iter().map(|v| v.on_device).sum();
            let off: u64 = o.vms.iter().map(|v| v.on_cpu).sum();
            let soj = o.vms.iter().map(|v| v.longest_sojourn).max().unwrap();
            let adm = o.vms.iter().map(|v| v.longest_admission).max().unwrap();
            let unfinished = o.vms.iter().filter(|v| v.finished.is_none()).count();
            println!(
                "{name:16} total {:8.1} ms cpu {:7.2} s (m {:.2} c {:.2}) check {:6.2} util {:.2} net {:.2} mem {:.2} dev {on} cpu {off} refused {} soj {:.0} us adm {:.0} us unfinished {unfinished} [{:?}]",
                o.total() as f64 / 1e6,
                o.cpu().total() / 1e9,
                o.cpu().measured / 1e9,
                o.cpu().charged / 1e9,
                o.check().total() / 1e9,
                o.utilisation(),
                o.network_busy / o.ended as f64,
                o.memory_busy / o.ended as f64,
                o.refused,
                soj as f64 / 1e3,
                adm as f64 / 1e3,
                t.elapsed()
            );
        };
        go("cpu", &|s| {
            s.structure = Structure::Cpu;
            s.devices = 0
        });
        for p in Policy::ALL {
            go(p.name(), &|s| s.policy = p);
            go(&format!("{} no spill", p.name()), &|s| {
                s.policy = p;
                s.spill = false
            });
        }
    }
}
