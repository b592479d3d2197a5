//! `scripts/mutants` on a small package: only a test that fails kills a mutant.

use std::fs;
use std::path::Path;
use std::process::Command;

const LIBRARY: &str = "\
pub fn double(number: u32) -> u32 {
    number * 2
}

#[test]
fn three_is_doubled() {
    assert_eq!(double(3), 6);
}
";
/// Runs at each build.
const BUILD: &str = "fn main() {\n    let endless = false;\n    while endless {}\n}\n";

/// Name, file, old and new.
const MUTANTS: [(&str, &str, &str, &str); 8] = [
    ("caught", "src/lib.rs", "number * 2", "number * 3"),
    ("not-noticed", "src/lib.rs", "number * 2", "number + number"),
    ("no-rust", "src/lib.rs", "number * 2", "number *"),
    ("not-there", "src/lib.rs", "number * 7", "number * 8"),
    ("aborts", "src/lib.rs", "number * 2", "std::process::abort()"),
    ("leaves", "src/lib.rs", "number * 2", "std::process::exit(number as i32)"),
    ("hangs", "src/lib.rs", "number * 2", "loop {}"),
    ("builds-for-ever", "build.rs", "endless = false", "endless = true"),
];

fn package() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/mutants");
    let list: String = MUTANTS
        .iter()
        .map(|(name, file, old, new)| {
            format!("[{name}]\nfile = {file}\nold = {old}\nnew = {new}\ntests = -p small --lib doubled\n\n")
        })
        .collect();
    for (file, text) in [
        ("Cargo.toml", "[package]\nname = \"small\"\nedition = \"2024\"\n"),
        (".gitignore", "/target\n"),
        ("build.rs", BUILD),
        ("src/lib.rs", LIBRARY),
        ("scripts/mutants.list", &list),
    ] {
        let file = dir.path().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    fs::copy(script, dir.path().join("scripts/mutants")).unwrap();
    assert!(Command::new("git").args(["init", "-q"]).current_dir(&dir).status().unwrap().success());
    dir
}

/// Whether the script is content, and what it printed.
fn mutants(dir: &Path, names: &[&str], limits: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(dir.join("scripts/mutants"));
    let run = command.args(names).envs(limits.iter().copied()).current_dir(dir).output().unwrap();
    (run.status.success(), String::from_utf8(run.stdout).unwrap() + &String::from_utf8(run.stderr).unwrap())
}

#[test]
fn only_a_test_that_fails_kills_a_mutant_and_what_is_not_built_is_an_error() {
    let dir = package();

    for (name, verdict, content) in [
        ("caught", "killed\n", true),
        ("aborts", "killed: the tests' process ended by signal: 6", true),
        ("not-noticed", "SURVIVED", false),
        ("no-rust", "DOES NOT COMPILE", false),
        ("not-there", "STALE: \"number * 7\" stands 0 times", false),
        ("leaves", "NO TEST FAILED, and yet: ", false),
    ] {
        let (success, output) = mutants(dir.path(), &[name], &[]);
        let line = output.lines().find(|line| line.contains(name)).unwrap_or_default();
        assert!(format!("{line}\n").contains(verdict), "{name}: {output}");
        assert_eq!(success, content, "{name}: {output}");
    }
    // What never ends is not there within any limit.
    let (success, output) = mutants(dir.path(), &["hangs"], &[("MUTANTS_TEST_LIMIT", "3")]);
    assert!(success && output.contains("timed out: the tests did not end within 3 s"), "{output}");
    assert!(output.contains("mutants: 0 killed, 1 timed out, 0 survived, 0 could not be made"), "{output}");
    let (success, output) = mutants(dir.path(), &["builds-for-ever"], &[("MUTANTS_BUILD_LIMIT", "3")]);
    assert!(!success && output.contains("NOT BUILT within 3 s"), "{output}");
    assert!(output.contains("mutants: 0 killed, 0 timed out, 0 survived, 1 could not be made"), "{output}");
}

#[test]
fn each_mutant_of_the_list_names_its_rule_and_can_be_made() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let list = fs::read_to_string(root.join("scripts/mutants.list")).unwrap();
    let mut made = 0;
    for mutant in list.split("\n[").skip(1) {
        let field = |name: &str| {
            mutant.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" =")).unwrap_or_default().trim_start()
        };
        let file = fs::read_to_string(root.join(field("file"))).unwrap();
        assert!(!field("rule").is_empty() && !field("tests").is_empty(), "[{mutant}");
        assert_eq!(file.matches(field("old")).count(), 1, "what is replaced stands once: [{mutant}");
        made += 1;
    }
    assert!(made > 50, "{made}");
}
