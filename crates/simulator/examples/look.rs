//! Prints runs.
use sterna_simulator::costs::Costs;
use sterna_simulator::host::run;
use sterna_simulator::many_vms::*;
use sterna_simulator::scenario::*;
use sterna_simulator::zero_page::*;
fn main() {
    let costs = Costs::default();
    for p in PUBLISHED {
        let f = Figures::of(&run(&published(&p, &costs, 1)), 25_600_000);
        println!(
            "{:20} main {:.0} ({:.0}) senders {:.0} ({:.0}) poll {:.0} ({:.0}) total {:.0} ({:.0}) util {:.2}",
            p.name,
            f.main,
            p.main / 25.6,
            f.senders,
            p.senders / 25.6,
            f.polling,
            p.polling / 25.6,
            f.total as f64 / 1e6,
            p.total,
            f.utilisation
        );
    }
    for search in [costs.search_page, 20.0] {
        for normal in [500, 0] {
            for (devices, spill) in [(0, false), (1, false), (1, true), (4, false), (4, true)] {
                let c = Costs { search_page: search, ..costs.clone() };
                let f = Figures::of(&run(&sterna(normal, devices, spill, &c, 1)), 25_600_000);
                println!(
                    "search {search:.0} normal {normal} dev {devices} spill {spill}: {:.1?} total {:.0} sum {:.1}",
                    f,
                    f.total as f64 / 1e6,
                    f.measured_and_charged()
                );
            }
        }
    }
    for mix in Mix::ALL {
        for policy in Policy::ALL {
            for spill in [false, true] {
                let s = unequal(mix, policy, spill);
                let o = run(&s);
                let unfinished = o.vms.iter().filter(|v| v.finished.is_none() && !v.died).count();
                println!(
                    "{:14} {:7} spill {spill}: total {:.0} worst wait {:.0} us util {:.2} cpu {:.1} refused {} {:.3?} unfinished {unfinished} hog {:.2}",
                    mix.name(),
                    policy.name(),
                    o.total() as f64 / 1e6,
                    longest_wait(&s, &o) as f64 / 1e3,
                    o.utilisation(),
                    o.cpu().total() / 1e9,
                    o.refused,
                    shares(&s, &o),
                    o.hog_device / o.ended as f64
                );
            }
        }
    }
}
