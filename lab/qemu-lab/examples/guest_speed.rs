//! How fast the test guest is on this machine: boot, fill, dirty and verify, under each release of QEMU.
//! `cargo run --release -p sterna-qemu-lab --example guest_speed`

use std::time::{Duration, Instant};

use sterna_qemu_lab::{Dirty, Error, Fill, Guest, LinuxGuest, Qemu, QemuOptions, QemuVersion, usage::Usage};

const LONG: Duration = Duration::from_secs(300);
const FILLED: u64 = 256 << 20;

fn main() -> Result<(), Error> {
    for version in QemuVersion::ALL {
        for (fill, dirty, rate) in [
            (Fill::Mixed, Dirty::Page, 0),
            (Fill::Mixed, Dirty::Page, 4 << 30),
            (Fill::Mixed, Dirty::Stamp, 4 << 30),
            (Fill::Corpus, Dirty::Page, 4 << 30),
            (Fill::Corpus, Dirty::Stamp, 4 << 30),
            (Fill::Random, Dirty::Page, 4 << 30),
        ] {
            let guest = LinuxGuest { fill, dirty, dirty_rate: rate, memory: Some(FILLED), ..LinuxGuest::default() };
            let start = Instant::now();
            let qemu = Qemu::start(&QemuOptions::new(version, Guest::Linux(guest)))?;
            let ready = qemu.guest().wait_ready(LONG)?;
            let boot = start.elapsed().as_secs_f64() - ready.seconds;
            let fill_rate = FILLED as f64 / ready.seconds / 1e6;
            let before = (Instant::now(), Usage::of(qemu.pid())?, qemu.guest().wait_tick_after(0, LONG)?);
            let after = qemu.guest().wait_tick_after(before.2.number + 10, LONG)?;
            let cpu = Usage::of(qemu.pid())?.since(&before.1).cpu_seconds() / before.0.elapsed().as_secs_f64();
            let milliseconds = (after.milliseconds - before.2.milliseconds).max(1);
            let dirtied = (after.dirtied - before.2.dirtied) as f64 * 4096.0 / 1e3 / milliseconds as f64;
            let start = Instant::now();
            qemu.guest().verify(LONG)?;
            let verify = FILLED as f64 / start.elapsed().as_secs_f64() / 1e6;
            println!(
                "QEMU {version} {} {fill:?} {dirty:?}: boot {boot:.1} s, fill {fill_rate:.0} MB/s, dirtied {dirtied:.0} MB/s, \
                 CPU {:.0} %, verify {verify:.0} MB/s",
                qemu.accel().name(),
                cpu * 100.0
            );
        }
    }
    Ok(())
}
