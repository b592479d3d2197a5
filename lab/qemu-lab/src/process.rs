//! Starts processes that end with this one, however it ends.
//!
//! Linux sends the parent-death signal when the *thread* that started a process ends (prctl(2), `PR_SET_PDEATHSIG`). Tests
//! run in short-lived threads, so one thread that lives as long as this process starts them all.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

struct Order {
    command: Command,
    answer: Sender<io::Result<Child>>,
}

/// Starts `command` in a process group of its own. The `inherited` descriptors stay open in it under their numbers and are closed here.
pub(crate) fn spawn(mut command: Command, inherited: Vec<OwnedFd>) -> io::Result<Child> {
    static SPAWNER: OnceLock<Sender<Order>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, queue) = channel::<Order>();
        thread::Builder::new()
            .name("lab-spawner".into())
            .spawn(move || {
                for mut order in queue {
                    let child = order.command.spawn();
                    // The descriptors that the closure holds are closed before the caller gets the child.
                    drop(order.command);
                    // If the caller has ended, the child is dropped while it runs, and ends with this process.
                    let _ = order.answer.send(child);
                }
            })
            .expect("a thread can be started");
        orders
    });
    command.process_group(0);
    // SAFETY: between fork and exec only two kinds of system call are made, through rustix, which neither allocates nor
    // locks; the descriptors are owned by the closure and so still open.
    unsafe {
        command.pre_exec(move || {
            for descriptor in &inherited {
                rustix::io::fcntl_setfd(descriptor.as_fd(), rustix::io::FdFlags::empty())?;
            }
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
            Ok(())
        });
    }
    let (answer, result) = channel();
    spawner.send(Order { command, answer }).map_err(|_| io::Error::other("the spawner thread has ended"))?;
    result.recv().map_err(|_| io::Error::other("the spawner thread has ended"))?
}
