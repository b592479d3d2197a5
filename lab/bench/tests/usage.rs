//! Wrong options are refused before anything is measured, with the choices that there are.

use std::process::{Command, Output};

fn run(line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sterna-bench")).args(line.split_whitespace()).output().unwrap()
}

/// Returns the message of a command that must fail with `code` and print no results.
#[track_caller]
fn refusal(output: &Output, code: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(output.stdout.is_empty(), "{:?}", String::from_utf8_lossy(&output.stdout));
    text.strip_prefix("sterna-bench: ").expect("the program's name comes first").trim_end().to_owned()
}

#[test]
fn a_benchmark_of_no_known_cell_is_refused_with_the_cells_that_there_are() {
    let text = refusal(&run("qemu --only memfd --only zzz"), 2);
    assert!(text.starts_with("--only: no cell's name contains 'zzz'"), "{text}");
    for cell in ["unlimited, memfd, QEMU none", "unlimited, huge pages, writing, direct none", "1 Gbit/s, direct auto"]
    {
        assert!(text.lines().any(|line| line.trim() == cell), "{text}");
    }
}

#[test]
fn only_benchmarks_that_have_more_cells_take_long_and_none_takes_it_with_quick() {
    let text = refusal(&run("ram --long"), 2);
    assert!(text.starts_with("--long:") && text.contains("'compression' and 'selection'"), "{text}");
    let text = refusal(&run("selection --only zzz"), 2);
    for cell in [
        "virtual: mixed, 1 Gbit/s × 2",
        "virtual: text, 40 Gbit/s × 4, 0.5 CPUs allowed, QAT",
        "real: mixed, 2.5 Gbit/s, then 250 Mbit/s",
    ] {
        assert!(text.lines().any(|line| line.trim() == cell), "{text}");
    }
    assert_eq!(run("compression --long --quick").status.code(), Some(2));
    let text = refusal(&run("compression --only zzz"), 2);
    for cell in [
        "unlimited, mixed, auto × 2",
        "1 Gbit/s, memcached written at 150 MB/s, zstd × 2",
        "100 Mbit/s, mixed, lz4 × 16",
    ] {
        assert!(text.lines().any(|line| line.trim() == cell), "{text}");
    }
}
