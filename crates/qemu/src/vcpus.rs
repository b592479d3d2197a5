//! The threads that run a guest's vCPUs, by which a process is known to be its QEMU.
//!
//! The process at the other end of a monitor's socket need not be QEMU: any program can forward a unix socket, and SO_PEERCRED then names that
//! program, which ends and starts again while QEMU lives. So only the process that has the vCPUs' threads is QEMU's.

use std::fs;

use serde_json::json;

use crate::qmp::Qmp;

/// Why a process is not known to be the QEMU behind a monitor.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotQemu {
    /// SO_PEERCRED names no process.
    #[error("the process that serves its monitor cannot be seen from here (another pid namespace)")]
    Unseen,
    /// QEMU does not report threads.
    #[error("{0}")]
    NoThreads(String),
    /// The process has other threads.
    #[error(
        "process {pid} serves its monitor and does not run its vCPUs, as a program that forwards a monitor ({why})"
    )]
    OtherThreads {
        /// The process.
        pid: i32,
        /// What is missing.
        why: String,
    },
}

/// Returns the process behind the monitor's socket.
///
/// # Errors
/// It is not known to be QEMU's.
pub(crate) fn process_of(qmp: &Qmp) -> Result<i32, NotQemu> {
    let pid = qmp.peer_pid().ok_or(NotQemu::Unseen)?;
    check(qmp, pid).map(|()| pid)
}

/// Checks that the process `pid` runs the vCPUs of the QEMU behind `qmp`.
///
/// # Errors
/// It does not, or that cannot be found out.
pub(crate) fn check(qmp: &Qmp, pid: i32) -> Result<(), NotQemu> {
    let listed = listed(qmp).map_err(NotQemu::NoThreads)?;
    let threads = threads(pid, &listed).map_err(|why| NotQemu::OtherThreads { pid, why })?;
    // No vCPU runs in QEMU's main thread. So a program with one thread is never taken for QEMU, even if that has the number of a vCPU's
    // thread in another pid namespace.
    if threads.is_empty() || threads.contains(&pid) {
        let why = if threads.is_empty() { "QEMU lists no vCPUs" } else { "its main thread would be a vCPU" };
        return Err(NotQemu::OtherThreads { pid, why: why.into() });
    }
    Ok(())
}

/// Returns the threads of the vCPUs by their numbers in QEMU's pid namespace, sorted. One thread may run several vCPUs
/// (TCG with `thread=single`).
pub(crate) fn listed(qmp: &Qmp) -> Result<Vec<i32>, String> {
    let answer = qmp.execute("query-cpus-fast", json!({})).map_err(|error| error.to_string())?;
    let number = |vcpu: &serde_json::Value| i32::try_from(vcpu["thread-id"].as_i64()?).ok();
    let vcpus = answer.as_array().and_then(|vcpus| vcpus.iter().map(number).collect::<Option<Vec<_>>>());
    let mut vcpus = vcpus.ok_or("QEMU does not report which threads run its vCPUs")?;
    vcpus.sort_unstable();
    vcpus.dedup();
    Ok(vcpus)
}

/// Translates thread numbers of QEMU's pid namespace into those of this process's.
pub(crate) fn threads(pid: i32, vcpus: &[i32]) -> Result<Vec<i32>, String> {
    let unseen = |error: std::io::Error| format!("the threads of process {pid} cannot be seen: {error}");
    let mut known = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).map_err(unseen)?.filter_map(Result::ok) {
        let Some(tid) = thread.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A thread that has ended meanwhile is not one that QEMU has just listed.
        let Ok(status) = fs::read_to_string(thread.path().join("status")) else { continue };
        known.push((number_inside(&status).unwrap_or(tid), tid));
    }
    let here = |vcpu: &i32| known.iter().find(|(inside, _)| inside == vcpu).map(|&(_, tid)| tid);
    let threads = vcpus.iter().map(|vcpu| here(vcpu).ok_or(vcpu)).collect::<Result<_, _>>();
    threads.map_err(|vcpu| format!("process {pid} has no thread {vcpu}, which QEMU reports as a vCPU's"))
}

/// Returns the number of a thread in its own pid namespace: the last number of the line `NSpid` (proc_pid_status(5)).
fn number_inside(status: &str) -> Option<i32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_another_pid_namespace_is_known_by_the_number_that_it_has_there() {
        assert_eq!(number_inside("Name:\tqemu\nNSpid:\t4711\t7\nNSpgid:\t4700\t1\n"), Some(7));
        assert_eq!(number_inside("Name:\tqemu\nNSpid:\t4711\n"), Some(4711));
        assert_eq!(number_inside("Name:\tqemu\n"), None);
    }

    #[test]
    fn threads_of_this_process_are_found_and_others_are_not() {
        let own = std::process::id() as i32;
        assert_eq!(threads(own, &[own]).unwrap(), [own]);
        assert!(threads(own, &[own, 1]).unwrap_err().contains("no thread 1"));
    }
}
