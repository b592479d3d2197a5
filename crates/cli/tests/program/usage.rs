//! Messages and exit codes for commands that cannot be carried out: one message, the right exit code, no harm.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::support::{LONG, NOWHERE};
use sterna_qemu_lab::{Guest, Qemu, QemuOptions, QemuVersion, skip_if_unavailable};

const ID: &str = "000102030405060708090a0b0c0d0e0f";

fn sterna(home: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command.args(line.split_whitespace()).env("HOME", home).env("XDG_STATE_HOME", home.join("state")).current_dir(home);
    command.env("RUST_BACKTRACE", "1").stdin(Stdio::null());
    command
}

fn run(line: &str) -> Output {
    let home = tempfile::tempdir().unwrap();
    sterna(home.path(), line).output().unwrap()
}

/// The message of a command that must fail with `code`: everything on stderr, which begins with the program's name.
#[track_caller]
fn refusal(output: &Output, code: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(output.stdout.is_empty(), "{:?}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(text.matches("sterna: ").count(), 1, "one message: {text}");
    assert!(!text.contains("panicked") && !text.contains("RUST_BACKTRACE") && !text.contains("Error {"), "{text}");
    text.strip_prefix("sterna: ").expect("the program's name comes first").trim_end().to_owned()
}

#[track_caller]
fn one_line(output: &Output, code: i32) -> String {
    let text = refusal(output, code);
    assert!(!text.contains('\n'), "one line: {text}");
    text
}

#[test]
fn without_tls_or_insecure_the_error_says_how_to_make_certificates_and_what_insecure_gives_up() {
    for line in [
        "send --qmp q.sock --to host:1",
        "receive --qmp q.sock --listen 127.0.0.1:0",
        "proxy send --unix u.sock --to host:1",
        "proxy receive --unix u.sock --listen 127.0.0.1:0",
    ] {
        let text = refusal(&run(line), 2);
        for part in ["--tls", "sterna cert --dir", "--insecure", "read and change the guest's memory"] {
            assert!(text.contains(part), "{line}: {text}");
        }
        assert!(text.lines().count() <= 6, "a few lines: {text}");
    }
}

#[test]
fn wrong_values_are_one_line_that_names_the_option() {
    for (option, value) in [
        ("--bandwidth", "1G"),
        ("--bandwidth", "100"),
        ("--downtime", "300"),
        ("--downtime", "5m"),
        ("--downtime", "-5ms"),
        ("--packet-size", "512K"),
        ("--packet-size", "5000"),
        ("--channels", "65"),
        ("--normal-page-ratio", "101"),
        ("--method", "lzma"),
        ("--engine", "gpu"),
        ("--max-cpus", "0"),
        ("--qatzip-software", "never"),
        ("--log", "loud"),
    ] {
        let text = one_line(&run(&format!("send --qmp q --to h:1 --insecure {option} {value}")), 2);
        assert!(text.starts_with(&format!("invalid value '{value}' for '{option} ")), "{text}");
    }
    let text = one_line(&run("send --qmp q --to h:1 --insecure --method zstd --level 10"), 2);
    assert_eq!(text, "--level: method zstd has the levels -5 to 9, not '10'");
    let text = one_line(&run("send --qmp q --to h:1 --insecure --method lz4 --level 1"), 2);
    assert!(text.starts_with("--level: method lz4 has no levels"), "{text}");
    let text = one_line(&run("send --qmp q --to h:1 --insecure --method deflate --engine iaa --level 2"), 2);
    assert!(text.starts_with("--level: method deflate by engine iaa has no levels"), "{text}");
    let text = one_line(&run("send --qmp q --to h:1 --insecure --method zstd --engine iaa"), 2);
    assert_eq!(text, "--engine: method zstd is encoded by the CPU; engine iaa is for the method deflate");
    for (old, new) in [("iaa", "iaa"), ("qatzip", "qat"), ("zlib", "cpu")] {
        let text = one_line(&run(&format!("send --qmp q --to h:1 --insecure --method {old}")), 2);
        assert!(text.contains(&format!("{old} is an engine: --method deflate --engine {new}")), "{text}");
    }
}

#[test]
fn an_engine_that_is_named_is_refused_where_it_is_not_there() {
    let line = "proxy send --unix u.sock --to h:1 --insecure --method deflate --engine qat --qatzip-library /nowhere";
    let text = one_line(&run(line), 6);
    let refusal = "engine qat is not there: QATzip is not available: there is no file /nowhere; install libqatzip";
    assert!(text.starts_with(refusal), "{text}");
    let text = one_line(&run("proxy send --unix u.sock --to h:1 --insecure --method deflate --engine iaa"), 6);
    assert!(text.starts_with("engine iaa is not there: "), "{text}");
}

#[test]
fn missing_unknown_and_contradicting_options_are_one_line() {
    for (line, part) in [
        ("send", "--to <HOST:PORT>, --qmp <PATH>"),
        ("send --qmp q --to h:1 --insecure --nonsense", "'--nonsense'"),
        ("send --qmp q --to h:1 --insecure --tls d", "cannot be used with"),
        ("send --qmp q --to host --insecure", "the port is missing"),
        ("receive --qmp q --listen :1 --insecure", "the host is missing"),
        ("receive --qmp q --listen h:1 --tls d", "--allow NAME"),
        ("proxy send --unix u --to h:1 --insecure --opaque a=b --opaque a=c", "--opaque a=… was given twice"),
        ("recover 12", "32 hexadecimal digits"),
        ("move", "unrecognized subcommand 'move'"),
    ] {
        let text = one_line(&run(line), 2);
        assert!(text.contains(part), "{line}: {text}");
    }
}

#[test]
fn what_needs_direct_mode_is_refused_where_that_was_excluded() {
    for option in
        ["--accel auto", "--accel iaa --iaa-verify always", "--checksums off", "--on-no-convergence throttle:10,10,90"]
    {
        let text = one_line(&run(&format!("send --qmp q --to h:1 --insecure --mode stream {option}")), 2);
        let name = option.split(' ').next().unwrap();
        assert_eq!(text, format!("{name}: it needs direct mode, and --mode stream was given"));
    }
    let text = one_line(&run("receive --qmp q --listen h:1 --insecure --placement in-stream --prefault"), 2);
    assert_eq!(text, "--prefault: it needs direct mode, and --placement in-stream was given");
    let text = one_line(&run("send --qmp q --to h:1 --insecure --iaa-verify always"), 2);
    assert!(text.contains("--accel"), "{text}");
}

#[test]
fn what_decides_about_the_guest_is_refused_where_it_cannot_be_moved_directly() {
    // This release does not report where its RAM lies.
    let Some(qemu) = qemu() else { return };
    let line = format!("send --qmp {} --to 127.0.0.1:1 --insecure --quiet", qemu.qmp_path().display());
    let text = one_line(&run(&format!("{line} --on-no-convergence give-up")), 6);
    let words = "--on-no-convergence needs direct mode, and the guest cannot be moved directly: QEMU 7.2";
    assert!(text.starts_with(words) && text.ends_with("(the guest was not touched)"), "{text}");
    assert_eq!(status(&qemu), "running");

    // A device that is named is not silently left out.
    let model = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&model, r#"{"devices":[{}]}"#).unwrap();
    let text = one_line(&run(&format!("{line} --accel model:{}", model.path().display())), 6);
    let words = format!("--accel model:{} needs direct mode, and the guest", model.path().display());
    assert!(text.starts_with(&words) && text.ends_with("(the guest was not touched)"), "{text}");
    assert_eq!(status(&qemu), "running");

    // What is for speed only does not keep the guest from moving: here nothing listens at the other end.
    let text = one_line(&run(&format!("{line} --accel auto --checksums off")), 7);
    assert!(text.contains("127.0.0.1:1") && !text.contains("--accel"), "{text}");
    assert_eq!(status(&qemu), "running");
}

#[test]
fn a_device_that_is_named_and_missing_is_refused_before_the_guests_memory_or_the_destination_is_looked_at() {
    // The first look at this release's memory ends in a refusal of its own.
    let Some(qemu) = qemu() else { return };
    let destination = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    destination.set_nonblocking(true).unwrap();
    let to = destination.local_addr().unwrap();
    let line = format!("send --qmp {} --to {to} --insecure --quiet --mode direct", qemu.qmp_path().display());
    for device in ["model:/nowhere/m.json", "dsa:/dev/dsa/wq9999.9"] {
        let text = one_line(&run(&format!("{line} --accel {device}")), 6);
        assert!(text.starts_with(&format!("accelerator {device}: ")), "{text}");
        assert!(text.ends_with("(the guest was not touched)"), "{text}");
    }
    let text = one_line(&run(&format!("{line} --method deflate --engine iaa")), 6);
    assert!(text.starts_with("engine iaa is not there"), "{text}");
    let contacted = destination.accept().map(drop).map_err(|error| error.kind());
    assert_eq!(contacted, Err(std::io::ErrorKind::WouldBlock));
    assert_eq!(status(&qemu), "running");
}

#[test]
fn help_and_version_go_to_stdout_and_explain_the_exit_codes() {
    for line in
        ["--help", "send --help", "receive --help", "proxy send --help", "proxy receive --help", "recover --help"]
    {
        let output = run(line);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
        assert!(text.contains("Exit codes:") && text.contains("4  unconfirmed"), "{line}: {text}");
        assert!(text.contains("9  this process may not do") && !text.contains("normal-page-ratio"), "{line}: {text}");
    }
    let version = run("--version");
    assert_eq!(String::from_utf8(version.stdout).unwrap(), format!("sterna {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(run("").status.code(), Some(2));
}

#[test]
fn bash_completes_commands_options_and_values() {
    let script = run("completions bash").stdout;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("sterna.bash");
    std::fs::write(&file, script).unwrap();
    let complete = |words: &[&str]| {
        let number = words.len() - 1;
        let [last, before] = [number, number - 1].map(|number| words[number]);
        let words = words.join(" ");
        let line = format!(
            ". {}; COMP_WORDS=({words}); COMP_CWORD={number}; _sterna sterna {last} {before}; echo ${{COMPREPLY[@]}}",
            file.display()
        );
        let output = Command::new("bash").args(["-c", &line]).output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    };
    assert_eq!(complete(&["sterna", "sen"]), "send");
    assert_eq!(complete(&["sterna", "send", "--on-no"]), "--on-no-convergence");
    assert_eq!(complete(&["sterna", "send", "--mode", "st"]), "stream");
    for shell in ["zsh", "fish"] {
        let output = run(&format!("completions {shell}"));
        assert!(output.status.success() && String::from_utf8(output.stdout).unwrap().contains("fenced-peer"));
    }
}

#[test]
fn every_command_has_a_manual_page_with_each_of_its_options() {
    let directory = tempfile::tempdir().unwrap();
    let made = run(&format!("man {}", directory.path().display()));
    assert!(made.status.success() && made.stdout.is_empty() && made.stderr.is_empty());
    for (page, command) in
        [("send", "send"), ("receive", "receive"), ("recover", "recover"), ("proxy-send", "proxy send")]
    {
        let text = std::fs::read_to_string(directory.path().join(format!("sterna-{page}.1"))).unwrap();
        // In the page, a hyphen is `\\-`.
        let text = text.replace('\\', "");
        let help = String::from_utf8(run(&format!("{command} --help")).stdout).unwrap();
        let options = help.split_whitespace().filter(|word| word.starts_with("--") && word.len() > 2);
        for option in options.map(|word| word.trim_end_matches(|end: char| !end.is_ascii_alphanumeric())) {
            assert!(text.contains(option), "{page}: {option}");
        }
    }
    assert!(std::fs::read_to_string(directory.path().join("sterna.1")).unwrap().contains("Exit codes"));
    assert_eq!(
        one_line(&run("man missing"), 1),
        "cannot write manual pages to missing: No such file or directory (os error 2)"
    );
}

#[test]
fn missing_certificates_are_one_line_that_names_the_file() {
    for line in
        ["send --qmp q --to h:1 --tls certs", "receive --qmp q --listen 127.0.0.1:0 --tls certs --allow sterna-sender"]
    {
        let text = one_line(&run(line), 6);
        assert!(text.contains("certs/") && text.contains(".pem"), "{text}");
    }
}

#[test]
fn an_engine_that_is_named_and_not_there_is_refused_before_anything_is_done() {
    let text = one_line(&run("proxy send --unix u --to h:1 --insecure --method deflate --engine iaa"), 6);
    assert!(text.starts_with("engine iaa is not there: "), "{text}");
}

#[test]
fn a_report_that_could_not_be_written_is_refused_before_anything_is_done() {
    let text = one_line(&run("send --qmp q --to h:1 --insecure --json missing/report.json"), 6);
    assert_eq!(
        text,
        "--json: cannot write the report to missing/report.json: there is no directory missing; make it, or give another path"
    );
}

#[test]
fn a_missing_qmp_socket_is_one_line_and_the_json_says_the_same() {
    for line in ["send --qmp no.sock --to 127.0.0.1:1", "receive --qmp no.sock --listen 127.0.0.1:0"] {
        let home = tempfile::tempdir().unwrap();
        let output = sterna(home.path(), &format!("{line} --insecure --quiet --json report.json")).output().unwrap();

        let text = one_line(&output, 6);
        assert!(text.contains("no.sock"), "{text}");
        let json = std::fs::read(home.path().join("report.json")).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!((json["outcome"].as_str(), json["reason"].as_str()), (Some("failed"), Some(text.as_str())));
        assert_eq!(json["exit_code"], 6);
    }
}

#[test]
fn an_unknown_migration_cannot_be_recovered() {
    let text = one_line(&run(&format!("recover {ID} --state-dir records")), 6);
    assert!(text.contains(ID), "{text}");
}

/// A QEMU without a guest system: its CPU runs the firmware, and its monitor says so.
fn qemu() -> Option<Qemu> {
    skip_if_unavailable(Qemu::start(&QemuOptions::new(QemuVersion::V7_2, Guest::None)))
}

/// What `query-status` answers.
fn status(qemu: &Qemu) -> String {
    let stream = UnixStream::connect(qemu.qmp_path()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut ask = |command: &str| {
        (&stream).write_all(format!("{{\"execute\":\"{command}\"}}").as_bytes()).unwrap();
        loop {
            let answer: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            if let Some(value) = answer.get("return") {
                return value.clone();
            }
            assert!(answer.get("error").is_none(), "{answer}");
        }
    };
    ask("qmp_capabilities");
    ask("query-status")["status"].as_str().unwrap().to_owned()
}

#[test]
fn an_unreachable_peer_is_one_line_and_the_guest_runs_on() {
    let Some(qemu) = qemu() else { return };
    let line = format!("send --qmp {} --to {NOWHERE} --insecure --quiet", qemu.qmp_path().display());

    let text = one_line(&run(&line), 7);

    assert!(text.contains(NOWHERE), "{text}");
    assert_eq!(status(&qemu), "running");
}

#[test]
fn a_qmp_socket_that_someone_else_uses_is_one_line_and_the_guest_runs_on() {
    let Some(qemu) = qemu() else { return };
    let busy = UnixStream::connect(qemu.qmp_path()).unwrap();
    let mut greeting = String::new();
    BufReader::new(&busy).read_line(&mut greeting).unwrap();
    let line = format!("send --qmp {} --to 127.0.0.1:1 --insecure --quiet", qemu.qmp_path().display());

    let text = one_line(&run(&line), 6);

    assert!(text.contains(&qemu.qmp_path().display().to_string()), "{text}");
    drop(busy);
    assert_eq!(status(&qemu), "running");
}

#[test]
fn a_receiver_that_waits_is_cancelled_by_a_signal() {
    let Some(qemu) = skip_if_unavailable(Qemu::start(&QemuOptions::new(QemuVersion::V7_2, Guest::None).incoming()))
    else {
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let line =
        format!("receive --qmp {} --listen 127.0.0.1:0 --insecure --json report.json", qemu.qmp_path().display());
    let mut child = sterna(home.path(), &line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    // The first note: signals are watched from before it on.
    let mut text = String::new();
    stderr.read_line(&mut text).unwrap();
    assert!(!text.starts_with("sterna: "), "{text}");

    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();

    stderr.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(3), "{text}");
    assert!(text.contains("SIGTERM: cancelling"), "{text}");
    let json = std::fs::read(home.path().join("report.json")).unwrap();
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&json).unwrap()["outcome"], "cancelled");
}

#[test]
fn certificates_serve_qemus_own_tls_too() {
    let home = tempfile::tempdir().unwrap();
    let made = sterna(home.path(), "cert --dir certs --host host-b").output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let directory = home.path().join("certs").display().to_string();
    for version in QemuVersion::ALL {
        let mut options = QemuOptions::new(version, Guest::None);
        for endpoint in ["server", "client"] {
            let object = format!("tls-creds-x509,id={endpoint},dir={directory},endpoint={endpoint},verify-peer=yes");
            options.extra.extend(["-object".to_owned(), object]);
        }
        // A QEMU that does not take a certificate does not start.
        let Some(qemu) = skip_if_unavailable(Qemu::start(&options)) else { return };
        assert_eq!(status(&qemu), "running");
    }
}
