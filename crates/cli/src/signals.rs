//! Ctrl-C and similar signals cancel; they never kill.
//!
//! The peer of a killed `sterna` notices that only by silence, and `sterna recover` may be needed. A cancelled `sterna` leaves the
//! guest running at the source. So SIGINT, SIGTERM and SIGHUP (the terminal was closed) all only cancel, however often they
//! come. To end the program at any price, use SIGQUIT or SIGKILL, and then `sterna recover`.

use std::io;
use std::thread::JoinHandle;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};
use sterna_engine::cancel::Cancel;

/// The effect of signals on a command, as messages to the user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meaning {
    /// The answer to the first signal.
    pub(crate) first: &'static str,
    /// The answer to later signals.
    pub(crate) again: &'static str,
}

impl Meaning {
    /// A migration of our own, including its switchover.
    pub(crate) const MIGRATION: Self = Self {
        first: "cancelling; unless the switchover is already decided, the guest goes on at the source",
        again: "it is already being cancelled, waiting until both sides have settled",
    };
    /// Migrations that other programs drive; these are responsible for the guests.
    pub(crate) const RELAY: Self = Self {
        first: "stopping; no new connections are accepted, and those in progress go on to their ends; a second signal closes them",
        again: "closing all connections, as if the network had failed; the programs that drive the migrations decide \
                what becomes of the guests",
    };
    /// Settling a migration after a crash.
    pub(crate) const RECOVERY: Self = Self {
        first: "cancelling; nothing more is decided here, and `sterna recover` can be run again",
        again: "it is already being cancelled",
    };
    /// Writing a trace of accelerators.
    pub(crate) const CAPTURE: Self =
        Self { first: "stopping; what was captured until now is kept", again: "it is already being stopped" };
}

/// Cancels on signals until it is dropped.
pub(crate) struct Watch {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// Cancels the first of `cancels` on the first signal and so on, and the last of them on all further signals. Answers every signal
/// through `say`, with the text from `meaning`.
///
/// # Errors
/// The system has no thread, descriptor or memory left.
pub(crate) fn watch(
    cancels: impl IntoIterator<Item = Cancel>,
    meaning: Meaning,
    say: impl Fn(&str) + Send + 'static,
) -> io::Result<Watch> {
    let cancels: Vec<Cancel> = cancels.into_iter().collect();
    let mut watched = vec![SIGINT, SIGTERM];
    if !is_ignored(SIGHUP) {
        watched.push(SIGHUP);
    }
    let mut signals = Signals::new(watched)?;
    let handle = signals.handle();
    let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for (earlier, signal) in signals.forever().enumerate() {
            say(&answer(signal, meaning, cancels.first().is_some_and(Cancel::is_cancelled)));
            if let Some(cancel) = cancels.get(earlier).or(cancels.last()) {
                cancel.cancel();
            }
        }
    })?;
    Ok(Watch { handle, thread: Some(thread) })
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread has been printed.
            let _ = thread.join();
        }
    }
}

fn answer(signal: i32, meaning: Meaning, already: bool) -> String {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("signal");
    format!("{name}: {}", if already { meaning.again } else { meaning.first })
}

/// Returns whether the process was started with the signal ignored, as `nohup` does with SIGHUP; then it stays ignored.
/// Returns false if that cannot be read.
fn is_ignored(signal: i32) -> bool {
    // proc_pid_status(5): SigIgn is a mask in hexadecimal, bit 0 for signal 1.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).map(str::trim).unwrap_or("0");
    u64::from_str_radix(mask, 16).is_ok_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn the_first_signal_cancels_and_the_second_is_answered_that_it_is_being_cancelled() {
        let cancel = Cancel::new();
        let (sender, answers) = mpsc::channel();
        let watch =
            watch([cancel.clone()], Meaning::MIGRATION, move |text| sender.send(text.to_owned()).unwrap()).unwrap();
        assert!(!cancel.is_cancelled());

        let answer = || answers.recv_timeout(Duration::from_secs(30)).expect("an answer to the signal");
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert!(answer().starts_with("SIGTERM: cancelling"));
        signal_hook::low_level::raise(SIGINT).unwrap();
        assert!(answer().starts_with("SIGINT: it is already being cancelled"));

        drop(watch);
        assert!(cancel.is_cancelled());
        assert!(answers.recv().is_err(), "the thread has ended, and dropped the sender");
    }

    #[test]
    fn a_signal_that_is_ignored_from_the_start_is_recognised() {
        assert!(is_ignored(signal_hook::consts::SIGPIPE), "Rust programs start with SIGPIPE ignored");
        assert!(!is_ignored(signal_hook::consts::SIGALRM));
    }
}
