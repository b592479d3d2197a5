//! Shows the progress of a migration: one live bar on a terminal, plain lines elsewhere, at most one a second.
//!
//! All of it goes to stderr: stdout is for the report. A closed terminal or pipe must not stop a migration, so failed writes
//! are ignored.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sterna_engine::cancel::Cancel;
use sterna_engine::migration::Side;
use sterna_engine::report::{self, Observer, Progress, ReceiveProgress};
// Notes may quote QEMU or the peer.
use sterna_wire::text::printable;

/// Plain lines come no more often than this.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// Shows a migration's progress and notes.
pub(crate) struct Screen {
    view: View,
    cancel: Cancel,
}

enum View {
    /// A terminal.
    Bar(ProgressBar),
    /// A file, a pipe, or a terminal that log lines go to as well.
    Lines(Mutex<Lines>),
    /// `--quiet`: the address, and notes only during a cancellation, because the user then waits for an answer.
    Quiet,
}

struct Lines {
    out: Box<dyn Write + Send>,
    last: Option<Instant>,
}

impl Screen {
    /// Creates a view on stderr. With `logging`, log lines go there, too, which a live bar would garble.
    pub(crate) fn new(quiet: bool, logging: bool, cancel: Cancel) -> Self {
        let view = if quiet {
            View::Quiet
        } else if std::io::stderr().is_terminal() && !logging {
            View::Bar(bar(ProgressDrawTarget::stderr()))
        } else {
            View::Lines(Mutex::new(Lines { out: Box::new(std::io::stderr()), last: None }))
        };
        Self { view, cancel }
    }

    /// Shows a message that the user needs now, even with `--quiet`.
    pub(crate) fn say(&self, text: &str) {
        let text = printable(&with_options(text));
        match &self.view {
            View::Bar(bar) => bar.suspend(|| {
                let _ = writeln!(std::io::stderr(), "{text}");
            }),
            View::Lines(lines) => lines.lock().expect("writing does not panic").write(&text),
            View::Quiet => {
                let _ = writeln!(std::io::stderr(), "{text}");
            }
        }
    }

    /// Removes the bar, before the report is printed.
    pub(crate) fn finish(&self) {
        if let View::Bar(bar) = &self.view {
            bar.finish_and_clear();
        }
    }
}

impl Observer for Screen {
    fn progress(&self, progress: &Progress) {
        match &self.view {
            View::Bar(bar) => {
                bar.set_position(percent(progress) as u64);
                bar.set_prefix(printable(&headline(progress)));
                bar.set_message(figures(progress));
            }
            View::Lines(lines) => {
                lines.lock().expect("writing does not panic").progress(&line(progress), Instant::now());
            }
            View::Quiet => {}
        }
    }

    fn received(&self, progress: &ReceiveProgress) {
        match &self.view {
            View::Bar(bar) => {
                bar.set_position(percent_placed(progress) as u64);
                bar.set_prefix(progress.phase.words(Side::Destination));
                bar.set_message(placed(progress));
            }
            View::Lines(lines) => {
                let line = format!("{}, {}", progress.phase.words(Side::Destination), placed(progress));
                lines.lock().expect("writing does not panic").progress(&line, Instant::now());
            }
            View::Quiet => {}
        }
    }

    fn listening(&self, address: &str) {
        self.say(&format!("listening on {address}"));
    }

    fn note(&self, text: &str) {
        if !matches!(self.view, View::Quiet) || self.cancel.is_cancelled() {
            self.say(text);
        }
    }
}

impl Lines {
    fn write(&mut self, text: &str) {
        let _ = writeln!(self.out, "{text}");
    }

    fn progress(&mut self, line: &str, now: Instant) {
        if self.last.is_none_or(|last| now.saturating_duration_since(last) >= LINE_INTERVAL) {
            self.last = Some(now);
            self.write(&printable(line));
        }
    }
}

fn bar(target: ProgressDrawTarget) -> ProgressBar {
    // Two rows, because one would not fit into 80 columns.
    let style = ProgressStyle::with_template("[{bar:20}] {percent:>3} %  {prefix}\n{wide_msg}")
        .expect("the template is a constant")
        .progress_chars("=> ");
    ProgressBar::with_draw_target(Some(100), target).with_style(style)
}

fn line(progress: &Progress) -> String {
    format!("{}, {:.0} % of it done, {}", headline(progress), percent(progress), figures(progress))
}

/// Formats phase, round and pages.
fn headline(progress: &Progress) -> String {
    let deltas = match (progress.delta_pages, progress.same_pages) {
        (0, 0) => String::new(),
        (deltas, same) => format!(" ({deltas} deltas, {same} same)"),
    };
    let Progress { phase, round, normal_pages, zero_pages, .. } = progress;
    let interrupted = interrupted(progress.interruptions, progress.interrupted_ms);
    format!("{phase}, round {round}, {normal_pages} pages{deltas}, {zero_pages} zero{interrupted}")
}

/// Returns the library's text; one about rounds that do not converge with the options of this program that help.
pub(crate) fn with_options(text: &str) -> String {
    const WOULD_END_IT: &str = "throttling or post-copy would end it";
    const OPTIONS: &str = " (--downtime, --bandwidth, --method, --on-no-convergence throttle or post-copy)";
    text.replace(WOULD_END_IT, &[WOULD_END_IT, OPTIONS].concat())
}

/// Formats how often and for how long the migration was interrupted, if it was.
fn interrupted(interruptions: u32, ms: f64) -> String {
    match interruptions {
        0 => String::new(),
        _ => format!(", interrupted {}", report::interrupted(interruptions, ms)),
    }
}

/// Formats the estimated time left, if there is an estimate.
fn left(time_left_ms: Option<u64>) -> String {
    time_left_ms.map_or_else(String::new, |ms| format!(", {:.1} s left", ms as f64 / 1e3))
}

/// Formats rates, the predicted downtime, ratio and the time left.
fn figures(progress: &Progress) -> String {
    let downtime = progress.predicted_downtime_ms;
    // There is no prediction before the first rates are known, or while the guest dirties memory faster than the network carries it.
    let downtime = if downtime.is_finite() && downtime > 0.0 && downtime < 1e7 {
        format!("{downtime:.0} ms")
    } else {
        "unknown".to_owned()
    };
    format!(
        "{}, wire {} at {}, dirty {}, downtime {downtime}, ratio {:.2}{}",
        report::rate(progress.content_rate),
        report::bytes(progress.wire_bytes as f64),
        report::rate(progress.wire_rate),
        report::rate(progress.dirty_rate),
        progress.ratio,
        left(progress.time_left_ms)
    )
}

/// Formats how much a destination has placed.
fn placed(progress: &ReceiveProgress) -> String {
    let ReceiveProgress { total_bytes, normal_pages, zero_pages, placed_rate, missing_bytes, .. } = progress;
    let size = |bytes: u64| report::bytes(bytes as f64);
    let of = if *total_bytes > 0 { format!(" of {} of RAM", size(*total_bytes)) } else { String::new() };
    let missing = if *missing_bytes > 0 { format!(", {} at the source", size(*missing_bytes)) } else { String::new() };
    let rate = report::rate(*placed_rate);
    let left = left(progress.time_left_ms);
    let interrupted = interrupted(progress.interruptions, progress.interrupted_ms);
    let placed = size(bytes_here(progress));
    format!("{placed}{of} placed ({normal_pages} pages, {zero_pages} zero){missing}, {rate}{left}{interrupted}")
}

/// Returns how many bytes of RAM are placed and have not changed at the source, as far as this side knows: pages that are sent again count once.
fn bytes_here(progress: &ReceiveProgress) -> u64 {
    let ReceiveProgress { total_bytes, placed_bytes, remaining_bytes, .. } = *progress;
    match total_bytes {
        0 => placed_bytes,
        // Pages that the guest has never used are neither sent nor left.
        total => placed_bytes.min(total.saturating_sub(remaining_bytes.unwrap_or(0))),
    }
}

/// Returns the share of RAM that is placed and has not changed.
fn percent_placed(progress: &ReceiveProgress) -> f64 {
    match progress.total_bytes {
        0 => 0.0,
        total => 100.0 * bytes_here(progress) as f64 / total as f64,
    }
}

fn percent(progress: &Progress) -> f64 {
    match progress.total_bytes {
        0 => 0.0,
        total => 100.0 * total.saturating_sub(progress.remaining_bytes) as f64 / total as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use sterna_engine::migration::Phase;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Sink {
        fn lines(&self) -> Vec<String> {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(str::to_owned).collect()
        }
    }

    fn sample() -> Progress {
        Progress {
            phase: Phase::Rounds,
            elapsed_ms: 1500,
            round: 2,
            total_bytes: 4 << 30,
            remaining_bytes: 1 << 30,
            normal_pages: 786_432,
            delta_pages: 0,
            same_pages: 0,
            zero_pages: 1000,
            content_rate: 1.2e9,
            wire_bytes: 3 << 29,
            wire_rate: 6e8,
            ratio: 2.0,
            dirty_rate: 1.25e8,
            predicted_downtime_ms: 210.4,
            time_left_ms: Some(3_450),
            interruptions: 0,
            interrupted_ms: 0.0,
            devices: Vec::new(),
        }
    }

    #[test]
    fn a_line_has_every_figure() {
        assert_eq!(
            line(&sample()),
            "sending memory, round 2, 786432 pages, 1000 zero, 75 % of it done, 1.20 GB/s, wire 1.50 GiB at 600.00 MB/s, \
             dirty 125.00 MB/s, downtime 210 ms, ratio 2.00, 3.5 s left"
        );
    }

    #[test]
    fn an_interruption_is_shown_with_its_duration() {
        let progress = Progress { interruptions: 2, interrupted_ms: 1_250.0, ..sample() };
        assert!(headline(&progress).ends_with(", 1000 zero, interrupted 2 times, 1.2 s all together"));
    }

    #[test]
    fn delta_pages_and_unchanged_pages_are_shown_separately() {
        let progress = Progress { delta_pages: 20_000, same_pages: 7, ..sample() };
        assert_eq!(headline(&progress), "sending memory, round 2, 786432 pages (20000 deltas, 7 same), 1000 zero");
    }

    #[test]
    fn the_two_rows_of_the_bar_fit_a_terminal_of_80_columns_but_for_the_ratio() {
        assert!("[====================] 100 %  ".len() + headline(&sample()).len() <= 80);
        assert!(figures(&sample()).find(", ratio").unwrap() <= 80);
    }

    #[test]
    fn an_unknown_downtime_is_not_shown_as_a_number() {
        for downtime in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            let progress = Progress { predicted_downtime_ms: downtime, ..Progress::default() };
            assert!(line(&progress).contains("downtime unknown,"), "{downtime}");
        }
        assert_eq!(percent(&Progress::default()), 0.0);
        assert_eq!(percent(&Progress { total_bytes: 1, remaining_bytes: 5, ..Progress::default() }), 0.0);
    }

    #[test]
    fn a_destination_shows_how_much_of_the_announced_ram_it_has_placed() {
        let mut progress = ReceiveProgress {
            phase: Phase::Rounds,
            elapsed_ms: 1500,
            total_bytes: 4 << 30,
            placed_bytes: 1 << 30,
            normal_pages: 262_000,
            zero_pages: 144,
            placed_rate: 1.2e9,
            missing_bytes: 0,
            remaining_bytes: Some(3 << 30),
            time_left_ms: Some(2_500),
            interruptions: 0,
            interrupted_ms: 0.0,
        };
        let text = "1.00 GiB of 4.00 GiB of RAM placed (262000 pages, 144 zero), 1.20 GB/s, 2.5 s left";
        assert_eq!((placed(&progress).as_str(), percent_placed(&progress)), (text, 25.0));
        assert!(text.find(", 2.5 s left").unwrap() <= 80, "a row of the bar, but for the time left");
        let sink = Sink::default();
        let lines = Lines { out: Box::new(sink.clone()), last: None };
        Screen { view: View::Lines(Mutex::new(lines)), cancel: Cancel::new() }.received(&progress);
        assert_eq!(sink.lines(), [format!("receiving memory, {text}")]);
        // Rounds send pages again, which the guest has written.
        progress.placed_bytes = 5 << 30;
        assert!(placed(&progress).starts_with("1.00 GiB of 4.00 GiB"));
        progress.remaining_bytes = None;
        assert_eq!(percent_placed(&progress), 100.0);
        assert!(placed(&progress).starts_with("4.00 GiB of 4.00 GiB"));
        let unknown = ReceiveProgress { placed_bytes: 4096, missing_bytes: 1 << 20, ..ReceiveProgress::default() };
        assert_eq!(placed(&unknown), "4.00 KiB placed (0 pages, 0 zero), 1.00 MiB at the source, 0 B/s");
        assert_eq!(percent_placed(&unknown), 0.0);
    }

    #[test]
    fn lines_come_at_most_once_a_second_and_notes_at_once() {
        let sink = Sink::default();
        let mut lines = Lines { out: Box::new(sink.clone()), last: None };
        let start = Instant::now();
        for tenth in 0..=20 {
            lines.progress(&line(&sample()), start + Duration::from_millis(tenth * 100));
        }
        assert_eq!(sink.lines().len(), 3, "at 0, 1 and 2 seconds");

        let screen = Screen { view: View::Lines(Mutex::new(lines)), cancel: Cancel::new() };
        screen.note("peer says \x1b[2J\nforged");
        assert_eq!(sink.lines().last().unwrap(), "peer says  [2J forged");
    }

    #[test]
    fn a_closed_sink_stops_nothing() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        }
        let lines = Lines { out: Box::new(Gone), last: None };
        let screen = Screen { view: View::Lines(Mutex::new(lines)), cancel: Cancel::new() };
        screen.note("one");
        screen.progress(&sample());
        let View::Lines(lines) = &screen.view else { unreachable!("made above") };
        assert!(lines.lock().unwrap().last.is_some());
    }
}
