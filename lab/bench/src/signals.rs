//! Ctrl-C and similar signals cancel a run; its guests end with it.

use std::io;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use sterna_engine::cancel::Cancel;

/// Cancels `cancel` on SIGINT, SIGTERM and SIGHUP from now on, and reports it through `progress`.
///
/// # Errors
/// The system has no thread, descriptor or memory left.
pub(crate) fn cancel_on_signals(cancel: Cancel, progress: impl Fn(&str) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain((!is_ignored(SIGHUP)).then_some(SIGHUP)))?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for _ in signals.forever() {
            progress(if cancel.is_cancelled() {
                "it is already being cancelled"
            } else {
                "cancelling; the guests of this run end with it"
            });
            cancel.cancel();
        }
    })?;
    Ok(())
}

/// Returns whether the process was started with the signal ignored, as `nohup` does with SIGHUP; then it stays ignored.
/// Returns false if that cannot be read.
fn is_ignored(signal: i32) -> bool {
    // proc_pid_status(5): SigIgn is a mask in hexadecimal, bit 0 for signal 1.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).map(str::trim).unwrap_or("0");
    u64::from_str_radix(mask, 16).is_ok_and(|mask| mask >> (signal - 1) & 1 == 1)
}
