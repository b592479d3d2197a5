//! Injects system calls into processes that make it hard: they wait in the kernel or never enter it, get many signals, stop, fork,
//! execute programs, forbid tracing, die. Each is this program itself, started again in a role ([`roles`]). After each case the test
//! checks that the process's own work was correct, and that nothing was left in it.

#[cfg(target_arch = "x86_64")]
mod deaths;
#[cfg(target_arch = "x86_64")]
mod refusals;
#[cfg(target_arch = "x86_64")]
mod roles;
#[cfg(target_arch = "x86_64")]
mod signals;
#[cfg(target_arch = "x86_64")]
mod slowdown;
#[cfg(target_arch = "x86_64")]
mod soak;
#[cfg(target_arch = "x86_64")]
mod target;
#[cfg(target_arch = "x86_64")]
mod tracking;
#[cfg(target_arch = "x86_64")]
mod waiting;

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    if !std::env::args().any(|word| word == "--list") {
        println!("skipped: written for x86-64 only");
    }
}

/// Runs the cases one after the other, with the options of `cargo test` and cargo-nextest: words are parts of names, `--list`, `--exact`,
/// `--skip`, and `--ignored`, which no case is. Other options are for a harness with threads and have no effect.
#[cfg(target_arch = "x86_64")]
fn main() {
    let mut words = std::env::args().skip(1);
    let (mut filters, mut skips, mut exact, mut list, mut ignored) = (Vec::new(), Vec::new(), false, false, false);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--role" => return roles::play(&words.collect::<Vec<_>>()),
            "--exact" => exact = true,
            "--list" => list = true,
            "--ignored" => ignored = true,
            "--skip" => skips.extend(words.next()),
            "--test-threads" | "--color" | "--format" | "--logfile" | "-Z" => drop(words.next()),
            option if option.starts_with('-') => {}
            _ => filters.push(word),
        }
    }
    let modules =
        [waiting::CASES, signals::CASES, refusals::CASES, deaths::CASES, tracking::CASES, slowdown::CASES, soak::CASES];
    let cases: Vec<(&str, fn())> = if ignored { Vec::new() } else { modules.concat() };
    let fits = |name: &str, word: &String| if exact { name == word } else { name.contains(word) };
    let mut failed = Vec::new();
    let mut passed = 0;
    for (name, case) in cases {
        if !filters.is_empty() && !filters.iter().any(|word| fits(name, word))
            || skips.iter().any(|word| fits(name, word))
        {
            continue;
        }
        if list {
            println!("{name}: test");
            continue;
        }
        println!("test {name} ...");
        if std::panic::catch_unwind(case).is_ok() {
            println!("test {name} ... ok");
            passed += 1;
        } else {
            failed.push(name);
            println!("test {name} ... FAILED");
        }
    }
    if list {
        return;
    }
    target::print_stops();
    println!(
        "\ntest result: {}. {passed} passed; {} failed: {failed:?}",
        if failed.is_empty() { "ok" } else { "FAILED" },
        failed.len()
    );
    if !failed.is_empty() {
        std::process::exit(101);
    }
}
