//! Reads facts about a process from `/proc` and the clock: its identity across reuse of its number, its CPU time, its
//! page faults.

use rustix::time::{ClockId, clock_gettime};
use sterna_wire::switchover::ProcessIdentity;

/// Returns the identity of process `pid`, while it lives. A zombie has ended and only waits for its parent.
///
/// Source: fields 3 and 22 of `/proc/PID/stat`, proc(5).
pub fn identity(pid: u32) -> Option<ProcessIdentity> {
    let stat = stat(pid)?;
    let state = field(&stat, 3)?;
    let start_ticks = field(&stat, 22)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(ProcessIdentity { pid, start_ticks })
}

/// Returns whether the process with this identity still lives.
pub fn lives(process: ProcessIdentity) -> bool {
    identity(process.pid) == Some(process)
}

/// Returns whether process `pid` is stopped, as SIGSTOP and a terminal's Ctrl-Z do. A process that a tracer has stopped goes on by itself.
pub fn is_stopped(pid: u32) -> bool {
    stat(pid).is_some_and(|stat| field(&stat, 3) == Some("T"))
}

/// Returns the CPU-seconds of this process so far.
pub fn own_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the minor and major page faults of a process so far; 0 when it is gone. Fields 10 and 12 of
/// `/proc/PID/stat`.
pub fn faults(pid: u32) -> u64 {
    let stat = stat(pid).unwrap_or_default();
    [10, 12].iter().filter_map(|number| field(&stat, *number)?.parse::<u64>().ok()).sum()
}

fn stat(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()
}

/// Returns field `number` of a stat line, from 3 on, numbered as in proc(5). The name in field 2 may contain any
/// characters, so counting starts behind the last bracket.
fn field(stat: &str, number: usize) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(number - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_distinguished_from_another_with_its_number() {
        let own = identity(std::process::id()).unwrap();
        assert!(lives(own));
        assert!(!lives(ProcessIdentity { start_ticks: own.start_ticks + 1, ..own }));
        assert_eq!(identity(u32::MAX), None);
    }

    #[test]
    fn a_process_that_waits_for_its_parent_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id();
        rustix::process::waitid(
            rustix::process::WaitId::Pid(rustix::process::Pid::from_child(&child)),
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT,
        )
        .unwrap();
        assert_eq!(identity(pid), None);
        child.wait().unwrap();
    }

    #[test]
    fn a_process_is_stopped_from_sigstop_to_sigcont() {
        use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = Pid::from_child(&child);
        assert!(!is_stopped(child.id()));
        for (signal, event, stopped) in
            [(Signal::STOP, WaitIdOptions::STOPPED, true), (Signal::CONT, WaitIdOptions::CONTINUED, false)]
        {
            kill_process(pid, signal).unwrap();
            waitid(WaitId::Pid(pid), event).unwrap();
            assert_eq!(is_stopped(child.id()), stopped);
            assert!(identity(child.id()).is_some(), "it lives");
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(child.id()));
    }

    #[test]
    fn names_with_brackets_and_spaces_do_not_confuse_the_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 11 12 13 14";
        assert_eq!((field(stat, 3), field(stat, 10), field(stat, 12)), (Some("S"), Some("11"), Some("13")));
    }

    #[test]
    fn work_costs_cpu_time_and_touching_memory_costs_faults() {
        let (cpu, faulted) = (own_cpu_seconds(), faults(std::process::id()));
        let touched = std::hint::black_box(vec![1u8; 32 << 20]);
        assert!(faults(std::process::id()) > faulted, "{}", touched.len());
        assert!(own_cpu_seconds() > cpu);
    }
}
