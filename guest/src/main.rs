//! The test guests' `/init`: fills its memory, dirties it, and proves all the while, also after a move to another machine,
//! that every page is what the guest itself wrote last.
//!
//! It speaks on the console (`/dev/console`, a serial line). Lines that it writes:
//!
//! ```text
//! sterna-guest ready pages=N memory=BYTES fill=NAME seconds=S
//! sterna-guest tick N ms=M rate=BYTES dirtied=PAGES verified=PAGES bad=N       about every 200 ms
//! sterna-guest verified pages=N bad=N generation=N table=whole|broken ms=M     the answer to 'verify'
//! sterna-guest BAD page I expected generation G found WHAT                     the first 50 of them
//! sterna-guest error TEXT
//! ```
//!
//! and where it works with files, how many steps were done with which:
//!
//! ```text
//! sterna-guest files given=N journal=N slots=N deleted=N made=N bad=N          with every tick
//! sterna-guest closed given=N journal=N slots=N deleted=N made=N bad=N         the answer to 'close'
//! sterna-guest BAD file NAME STEP: WHAT
//! ```
//!
//! and where it works with disks, what was done with all of them; `in-flight` counts threads that are in a read or a write:
//!
//! ```text
//! sterna-guest disks reads=N writes=N bytes=N checked=PAGES in-flight=N bad=N  with every tick
//! sterna-guest disks-checked buffers=N busy=N pages=N bad=N                    the answer to 'check-disks'
//! sterna-guest BAD disk NAME offset BYTES page I expected generation G found WHAT, at once|later
//! sterna-guest BAD disk NAME read or write N: ERROR                            of that thread the last
//! ```
//!
//! What it reads: `verify`, `stop`, `go`, `rate BYTES`, `close`, `check-disks`, `pause-disks`, `resume-disks`, `quit`. Times are the guest's own; a generation counts writings.
//!
//! On a host, `sterna-guest dump FILL PAGES` writes such memory to its output, for measuring codecs.

mod disks;
mod files;
mod settings;
mod system;

use std::io::Write;
use std::time::{Duration, Instant};

use disks::Disks;
use files::Files;
use settings::{Settings, size};
use sterna_guest::content::PAGE_BYTES;
use sterna_guest::memory::{Bad, Memory, Plan, Progress};
use sterna_guest::page;
use system::Console;

/// How often a counter line is written.
const TICK: Duration = Duration::from_millis(200);
/// How long the guest works or rests at a time before it looks at the console again.
const SLICE: Duration = Duration::from_millis(10);
/// Decides the order of pages written at random.
const SEED: u64 = 0x6469_7274;
/// Wrong pages that are described; more are counted only.
const BAD_LINES: u64 = 50;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("dump") => dump(&arguments),
        _ if std::process::id() == 1 => run_as_init(),
        _ => {
            eprintln!(
                "sterna-guest is the init of Sterna's test guests.\nusage on a host: sterna-guest dump FILL PAGES"
            );
            std::process::exit(2);
        }
    }
}

/// Writes PAGES pages of FILL to standard output.
fn dump(arguments: &[String]) {
    let fill = arguments.get(2).and_then(|name| page::Fill::ALL.iter().find(|(known, _)| known == name));
    let count = arguments.get(3).and_then(|count| count.parse::<u64>().ok());
    let (Some(&(_, fill)), Some(count)) = (fill, count) else {
        eprintln!("usage: sterna-guest dump zeros|ones|sequence|random|text|corpus|mixed PAGES");
        std::process::exit(2);
    };
    let pages = page::Pages::new(fill);
    let mut output = std::io::BufWriter::with_capacity(1 << 20, std::io::stdout().lock());
    let mut page = [0; PAGE_BYTES];
    for index in 0..count {
        pages.write(&mut page, index, page::FIRST_GENERATION);
        if output.write_all(&page).is_err() {
            // The reader has seen enough.
            return;
        }
    }
}

fn run_as_init() {
    let mut console = Console::open();
    if let Err(error) = live(&mut console) {
        console.line(format_args!("error {error}"));
    }
    system::power_off();
}

/// Everything from the command line to `quit`.
fn live(console: &mut Console) -> Result<(), String> {
    system::mount_basics().map_err(|error| format!("cannot mount: {error}"))?;
    let command_line = std::fs::read_to_string("/proc/cmdline").map_err(|error| format!("/proc/cmdline: {error}"))?;
    let settings = Settings::parse(&command_line)?;
    if settings.share.is_some() || settings.disks.disks > 0 || settings.balloon {
        system::load_modules().map_err(|error| format!("cannot load the modules: {error}"))?;
    }
    // Before free memory is counted: the disks' buffers are beside what is filled.
    let disks = match settings.disks.disks {
        0 => None,
        _ => Some(Disks::begin(settings.disks).map_err(|error| format!("disks: {error}"))?),
    };
    let bytes = match settings.memory {
        Some(bytes) => bytes,
        None => system::free_memory().map_err(|error| format!("/proc/meminfo: {error}"))? / 4 * 3,
    };
    let pages = system::allocate_pages(bytes as usize / PAGE_BYTES)
        .map_err(|error| format!("cannot allocate {bytes} bytes: {error}"))?;
    let span = settings.dirty_span.unwrap_or(bytes) as usize / PAGE_BYTES;
    let plan = Plan { fill: settings.fill, pattern: settings.pattern, span, first: 0 };
    let table = vec![0; pages.len()].leak();
    let mut memory = Memory::new(pages, table, plan, Progress { random: SEED, ..Progress::default() });
    let start = Instant::now();
    memory.fill();
    if settings.balloon {
        // What a balloon takes then is not zero, as in a guest that has run for long.
        let free = system::free_memory().map_err(|error| format!("/proc/meminfo: {error}"))?;
        drop(std::hint::black_box(vec![0x5a_u8; free as usize / 4 * 3]));
    }
    let files = match &settings.share {
        Some(tag) => {
            Some(Files::begin(tag, settings.deleted).map_err(|error| format!("shared directory {tag}: {error}"))?)
        }
        None => None,
    };
    let fill = page::Fill::ALL.iter().find(|(_, fill)| *fill == settings.fill).map_or("", |(name, _)| name);
    console.line(format_args!(
        "ready pages={} memory={} fill={fill} seconds={:.3}",
        memory.count(),
        memory.bytes(),
        start.elapsed().as_secs_f64()
    ));
    Worker {
        memory,
        whole: settings.dirty_whole,
        dirty: Pace::new(settings.dirty_rate),
        verify: Pace::new(settings.verify_rate),
        bad: 0,
        files,
        disks,
    }
    .work(console);
    Ok(())
}

/// How much of a rate is due: what was missed while the machine was stopped or busy is not made up for.
struct Pace {
    bytes_per_second: u64,
    last: Instant,
    /// Nanoseconds times bytes a second that were not yet a page.
    rest: u128,
    done: u64,
}

impl Pace {
    fn new(bytes_per_second: u64) -> Self {
        Pace { bytes_per_second, last: Instant::now(), rest: 0, done: 0 }
    }

    /// Pages due since the last call, at most `SLICE` × 4 worth of them.
    fn due(&mut self) -> u64 {
        const PAGE: u128 = PAGE_BYTES as u128 * 1_000_000_000;
        let now = Instant::now();
        let elapsed = now.duration_since(self.last).min(SLICE * 4);
        self.last = now;
        self.rest += elapsed.as_nanos() * u128::from(self.bytes_per_second);
        let pages = self.rest / PAGE;
        self.rest %= PAGE;
        pages as u64
    }
}

struct Worker {
    memory: Memory<'static>,
    whole: bool,
    dirty: Pace,
    verify: Pace,
    bad: u64,
    files: Option<Files>,
    disks: Option<Disks>,
}

impl Worker {
    /// Dirties, verifies, ticks and obeys until `quit`.
    fn work(&mut self, console: &mut Console) {
        let start = Instant::now();
        let (mut tick, mut last_tick, mut dirtied_at_tick) = (0u64, start, 0u64);
        let mut dirtying = true;
        loop {
            let due = self.dirty.due();
            let slice = Instant::now();
            if dirtying {
                for _ in 0..due {
                    if let Err(bad) = self.memory.dirty_next(self.whole) {
                        self.report(bad, console);
                    }
                    self.dirty.done += 1;
                    // More is asked for than this machine can do: look at the console all the same.
                    if self.dirty.done.is_multiple_of(16) && slice.elapsed() > SLICE {
                        break;
                    }
                }
            }
            let slice = Instant::now();
            for _ in 0..self.verify.due() {
                if let Err(bad) = self.memory.check_next() {
                    self.report(bad, console);
                }
                self.verify.done += 1;
                if slice.elapsed() > SLICE {
                    break;
                }
            }
            let since = last_tick.elapsed();
            if since >= TICK {
                tick += 1;
                last_tick = Instant::now();
                let rate = (self.dirty.done - dirtied_at_tick) as f64 * PAGE_BYTES as f64 / since.as_secs_f64();
                dirtied_at_tick = self.dirty.done;
                console.line(format_args!(
                    "tick {tick} ms={} rate={rate:.0} dirtied={} verified={} bad={}",
                    start.elapsed().as_millis(),
                    self.dirty.done,
                    self.verify.done,
                    self.bad
                ));
                self.say_files("files", console);
                self.report_disks(console);
            }
            let rest = SLICE.saturating_sub(self.dirty.last.elapsed());
            let Some(command) = console.command(rest) else { continue };
            match command.split_once(' ').unwrap_or((&command, "")) {
                ("verify", "") => self.verify_all(console),
                ("stop", "") => dirtying = false,
                ("go", "") => dirtying = true,
                ("close", "") => {
                    self.files.iter_mut().for_each(Files::close);
                    self.say_files("closed", console);
                }
                ("check-disks", "") => {
                    let checked = self.disks.as_ref().map(Disks::check_all).unwrap_or_default();
                    self.report_disks(console);
                    console.line(format_args!("disks-checked {checked}"));
                }
                ("pause-disks", "") => self.disks.iter().for_each(Disks::pause),
                ("resume-disks", "") => self.disks.iter().for_each(Disks::resume),
                ("rate", value) => match size(value) {
                    Some(rate) => self.dirty.bytes_per_second = rate,
                    None => console.line(format_args!("error rate {value}: expected bytes a second, as 50M")),
                },
                ("quit", "") => return,
                ("", "") => {}
                _ => console.line(format_args!(
                    "error {command}: expected verify, stop, go, rate BYTES, close, check-disks, pause-disks, resume-disks, quit"
                )),
            }
        }
    }

    fn report(&mut self, bad: Bad, console: &mut Console) {
        self.bad += 1;
        if self.bad <= BAD_LINES {
            console
                .line(format_args!("BAD page {} expected generation {} found {}", bad.index, bad.expected, bad.fault));
        }
    }

    fn say_files(&self, word: &str, console: &mut Console) {
        let Some(files) = &self.files else { return };
        for wrong in files.wrong() {
            console.line(format_args!("BAD file {wrong}"));
        }
        console.line(format_args!("{word} {files}"));
    }

    fn report_disks(&self, console: &mut Console) {
        let Some(disks) = &self.disks else { return };
        for wrong in disks.wrong() {
            console.line(format_args!("BAD disk {wrong}"));
        }
        console.line(format_args!("disks {disks}"));
    }

    fn verify_all(&mut self, console: &mut Console) {
        let start = Instant::now();
        let mut bad = 0u64;
        for index in 0..self.memory.count() {
            if let Err(wrong) = self.memory.check(index) {
                bad += 1;
                self.report(wrong, console);
            }
        }
        let table = if self.memory.table_is_whole() { "whole" } else { "broken" };
        console.line(format_args!(
            "verified pages={} bad={bad} generation={} table={table} ms={}",
            self.memory.count(),
            self.memory.progress().writings,
            start.elapsed().as_millis()
        ));
    }
}
