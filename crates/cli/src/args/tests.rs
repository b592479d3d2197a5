use std::path::PathBuf;
use std::time::Duration;

use super::*;
use clap::CommandFactory;
use sterna_codec::{Qatzip, QatzipSoftware};
use sterna_engine::source::{IaaVerify, NotConverging, Throttle};
use sterna_qemu::gateway::{DirectOptions, Monitor, Placement, WaitLimits};
use sterna_wire::limits::MAX_NAME;

use super::link::{listen_address, peer_address};
use super::proxy::{MAX_SOCKETS, OpaqueArgs, opaque};
use super::send::SourceAfterArg;

fn parse(line: &str) -> Result<Cli, String> {
    Cli::try_parse_from(line.split_whitespace()).map_err(|error| usage_error(&error).expect("an error, not help"))
}

fn error(line: &str) -> String {
    let error = parse(line).expect_err("wrong options");
    assert!(!error.contains('\n') && !error.contains('\x1b'), "one plain line: {error:?}");
    error
}

fn send(line: &str) -> SendArgs {
    match parse(&format!("sterna send --qmp q --to h:1 {line}")).unwrap().command {
        Command::Send(args) => *args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn the_defaults_are_those_of_the_help() {
    let args = send("--insecure");
    assert_eq!(args.link.qatzip(), Qatzip::default());
    assert_eq!((args.link.channels, args.link.method.name(), args.link.level), (2, "auto", None));
    assert_eq!((args.link.max_cpus, args.link.bandwidth, args.link.downtime), (None, None, Duration::from_millis(300)));
    assert_eq!(args.link.packet_size, sterna_wire::limits::DEFAULT_PACKET_SIZE);
    assert_eq!((args.normal_page_ratio, args.screen.quiet), (0, false));
    assert_eq!((args.report.json, args.state.state_dir), (None, None));
    assert_eq!((args.source_after, args.waits.time_limit), (SourceAfterArg::Quit, None));
    assert_eq!((args.waits.stall_limit, args.waits.retry), (Duration::from_secs(120), Duration::from_secs(300)));
}

#[test]
fn the_limit_of_cpus_may_be_a_fraction_and_holds_for_every_method() {
    assert_eq!(send("--insecure --max-cpus 0.5").link.max_cpus, Some(0.5));
    assert_eq!(send("--insecure --method lz4 --max-cpus 2").link.max_cpus, Some(2.0));
}

#[test]
fn how_qatzip_works_arrives() {
    let args = send("--insecure --method deflate --engine qat --qatzip-library /opt/qat --qatzip-software forbidden");
    let Qatzip { library, software, .. } = args.link.qatzip();
    assert_eq!((library, software), (Some("/opt/qat".into()), QatzipSoftware::Forbidden));
    let args = send("--insecure --method deflate --engine qat --qatzip-software always");
    assert_eq!(args.link.qatzip(), Qatzip { software: QatzipSoftware::Always, ..Qatzip::default() });
}

#[test]
fn every_option_of_send_arrives() {
    let args = send(
        "--channels 64 --method zstd --level -5 --bandwidth 1GB/s --downtime 2s --packet-size 1MiB \
         --normal-page-ratio 100 --delta-cache 3GiB --tls d --state-dir s --json - --quiet --log debug \
         --source-after keep --stall-limit 5s --time-limit 1min --retry 0s",
    );
    assert_eq!((args.link.channels, args.link.method.name(), args.link.level), (64, "zstd", Some(-5)));
    assert_eq!((args.link.bandwidth, args.link.downtime), (Some(1_000_000_000), Duration::from_secs(2)));
    assert_eq!((args.link.packet_size, args.normal_page_ratio, args.screen.quiet), (1 << 20, 100, true));
    assert_eq!((args.delta_cache, send("").delta_cache), (3 << 30, 0));
    assert_eq!(args.source_after, SourceAfterArg::Keep);
    let WaitLimits { stall, total, retry } = WaitLimits::from(&args.waits);
    assert_eq!((stall, total, retry), (Duration::from_secs(5), Some(Duration::from_secs(60)), Duration::ZERO));
    assert_eq!((args.tls.tls, args.tls.insecure), (Some("d".into()), false));
    assert_eq!((args.state.state_dir, args.report.json), (Some("s".into()), Some("-".into())));
}

#[test]
fn what_only_direct_mode_does_arrives() {
    let direct = |line: &str| DirectOptions::from(&send(&format!("--insecure {line}")).direct);
    assert_eq!(direct("").given(), None);
    let all =
        direct("--accel model:m.json --accel-weight 3 --iaa-verify always --checksums off --on-no-convergence give-up");
    assert_eq!((all.accelerators.to_string().as_str(), all.accelerator_weight), ("model:m.json", 3));
    assert_eq!((all.iaa_verify, all.checksums), (IaaVerify::Always, false));
    assert_eq!(all.not_converging, NotConverging::GiveUp);
    for (given, option) in [
        ("--accel auto", "--accel"),
        ("--accel dsa --accel-weight 2", "--accel"),
        ("--checksums off", "--checksums"),
        ("--accel iaa --on-no-convergence throttle", "--on-no-convergence"),
    ] {
        assert_eq!(direct(given).given(), Some(option), "{given}");
    }
}

#[test]
fn what_is_done_about_rounds_that_do_not_converge_has_its_parameters() {
    let of = |what: &str| {
        DirectOptions::from(&send(&format!("--insecure --on-no-convergence {what}")).direct).not_converging
    };
    assert_eq!(of("tell"), NotConverging::GoOn);
    assert_eq!(of("throttle"), NotConverging::Throttle(Throttle::default()));
    assert_eq!(of("throttle:5,1,50"), NotConverging::Throttle(Throttle { initial: 5, step: 1, max: 50 }));
    assert_eq!((of("post-copy"), of("post-copy:3")), (NotConverging::PostCopy, NotConverging::PostCopyAfter(3)));
}

#[test]
fn every_option_of_receive_arrives() {
    let line = "sterna receive --qmp q --listen [::]:0 --tls d --allow a --allow b --placement in-stream --json f";
    let Command::Receive(args) = parse(line).unwrap().command else { panic!("another command") };
    assert_eq!((args.listen.as_str(), args.tls.allow), ("[::]:0", vec!["a".to_owned(), "b".to_owned()]));
    assert_eq!(Placement::from(args.placement), Placement::InStream);
    assert_eq!((args.wait, args.prefault), (None, false));
    let line = "sterna receive --qmp q --listen a:1 --insecure --wait 90s --prefault";
    let Command::Receive(args) = parse(line).unwrap().command else { panic!("another command") };
    assert_eq!(Placement::from(args.placement), Placement::Auto);
    assert_eq!((args.wait, args.waits.time_limit, args.prefault), (Some(Duration::from_secs(90)), None, true));
}

#[test]
fn every_option_of_proxy_and_recover_arrives() {
    let line = "sterna proxy send --unix u --to h:1 --opaque nbd=/n --opaque ctl=/c=d --insecure --method lz4";
    let Command::Proxy(ProxyCommand::Send(args)) = parse(line).unwrap().command else { panic!("another command") };
    assert_eq!(args.opaque.checked().unwrap(), [("nbd".into(), "/n".into()), ("ctl".into(), "/c=d".into())]);
    let line = "sterna proxy receive --unix u --listen h:1 --opaque nbd=/n --opaque nbd=/c --insecure";
    let Command::Proxy(ProxyCommand::Receive(args)) = parse(line).unwrap().command else { panic!("another command") };
    assert_eq!(args.opaque.checked().unwrap_err(), "--opaque nbd=… was given twice; each name stands for one socket");

    let line = "sterna recover 000102030405060708090a0b0c0d0e0f --fenced-peer --tls d --allow a --state-dir s";
    let Command::Recover(args) = parse(line).unwrap().command else { panic!("another command") };
    assert_eq!(args.id.unwrap().to_string(), "000102030405060708090a0b0c0d0e0f");
    assert!(args.fenced_peer && !args.insecure && args.tls.is_some() && args.allow == ["a"]);
    // To fence the peer of whatever is not settled would be too easy.
    assert!(parse("sterna recover --insecure").is_ok() && parse("sterna recover --fenced-peer").is_err());
}

#[test]
fn wrong_values_are_refused_by_one_line_that_names_the_option() {
    let send = "sterna send --qmp q --to h:1 --insecure";
    for (option, value, reason) in [
        ("--channels", "0", "0 is not in 1..=64"),
        ("--channels", "65", "65 is not in 1..=64"),
        ("--channels", "two", "invalid digit"),
        ("--method", "lzma", "there is no method 'lzma'; there is none, lz4, zstd, deflate, auto"),
        ("--method", "iaa", "iaa is an engine: --method deflate --engine iaa"),
        ("--method", "qatzip", "qatzip is an engine: --method deflate --engine qat"),
        ("--method", "zlib", "zlib is an engine: --method deflate --engine cpu"),
        ("--bandwidth", "1000", "the unit is missing"),
        ("--bandwidth", "1GB", "the unit 'GB' is unknown or could mean two things"),
        ("--bandwidth", "0B/s", "leave the option out for no limit"),
        ("--downtime", "300", "the unit is missing"),
        ("--downtime", "0ms", "1ms to 2000s"),
        ("--downtime", "-5ms", "it cannot be negative"),
        ("--bandwidth", "-1GB/s", "it cannot be negative"),
        ("--downtime", "--quiet", "it must begin with a number, followed by us, ms, s or min, such as 300ms"),
        ("--stall-limit", "0s", "1ms"),
        ("--time-limit", "5", "the unit is missing"),
        ("--source-after", "stop", "possible values: quit, keep"),
        ("--packet-size", "-1", "it cannot be negative"),
        ("--packet-size", "512K", "such as 512KiB"),
        ("--packet-size", "1GiB", "4KiB to 16MiB"),
        ("--normal-page-ratio", "101", "101 is not in 0..=100"),
        ("--delta-cache", "1g", "GiB"),
        ("--accel", "gpu", "there is no accelerator called gpu"),
        ("--checksums", "maybe", "possible values: on, off"),
        ("--on-no-convergence", "stop", "expected tell, throttle"),
        ("--on-no-convergence", "give-up:3", "expected tell, throttle"),
        ("--on-no-convergence", "throttle:20", "three numbers of percent"),
        ("--on-no-convergence", "throttle:20,10,100", "at most (up to 99)"),
        ("--on-no-convergence", "throttle:60,10,50", "three numbers of percent"),
        ("--on-no-convergence", "throttle:0,10,50", "three numbers of percent"),
        ("--on-no-convergence", "throttle:20,0,50", "three numbers of percent"),
        ("--on-no-convergence", "post-copy:0", "a number of rounds from 1 on"),
        ("--log", "loud", "the levels are off, error, warn, info, debug, trace"),
        ("--log", "sterna=loud", "'--log <LEVEL>'"),
    ] {
        let error = error(&format!("{send} {option} {value}"));
        assert!(error.starts_with(&format!("invalid value '{value}' for '{option} <")), "{error}");
        assert!(error.contains(reason), "{error}");
    }
    let error_of_to = error("sterna send --qmp q --to host --insecure");
    assert!(
        error_of_to.starts_with("invalid value 'host' for '--to <HOST:PORT>': the port is missing"),
        "{error_of_to}"
    );
    let error = error("sterna proxy send --unix u --to h:1 --insecure --opaque nbd");
    assert!(error.contains("'--opaque <NAME=PATH>': it must be NAME=PATH, such as nbd=/run/vm/nbd.sock"), "{error}");
}

#[test]
fn options_that_contradict_each_other_are_refused_by_name() {
    let send = "sterna send --qmp q --to h:1";
    let receive = "sterna receive --qmp q --listen h:1";
    assert_eq!(
        error(&format!("{send} --tls d --insecure")),
        "the argument '--tls <DIR>' cannot be used with '--insecure'"
    );
    let contradiction = error(&format!("{receive} --insecure --allow a --tls d"));
    assert!(contradiction.starts_with("the argument '--insecure' cannot be used with: "), "{contradiction}");
    assert!(contradiction.contains("--tls <DIR>") && contradiction.contains("--allow <NAME>"), "{contradiction}");
    assert_eq!(
        error(&format!("{receive} --allow a")),
        "the following required arguments were not provided: --tls <DIR>"
    );
    assert_eq!(
        error(&format!("{send} --insecure --level 3")),
        "the following required arguments were not provided: --method <METHOD>"
    );
}

#[test]
fn a_qemu_of_libvirt_is_named_by_its_domain() {
    let send = |words: &str| {
        let line = format!("sterna send --to h:1 --insecure {words}");
        let Command::Send(args) = parse(&line).unwrap().command else { panic!("{line}") };
        args.monitor()
    };
    let domain = |uri: Option<&str>| Monitor::Libvirt { uri: uri.map(str::to_owned), domain: "web".into() };
    assert_eq!(send("--libvirt --domain web"), domain(None));
    assert_eq!(send("--libvirt qemu:///session --domain web"), domain(Some("qemu:///session")));
    assert_eq!(send("--qmp q"), Monitor::Socket("q".into()));
    for (words, part) in [
        ("--libvirt", "--domain <NAME>"),
        ("--domain web", "--libvirt"),
        ("--domain web --qmp q", "cannot be used with"),
        ("--libvirt --domain web --qmp q", "cannot be used with"),
    ] {
        let text = error(&format!("sterna send --to h:1 --insecure {words}"));
        assert!(text.contains(part), "{words}: {text}");
    }
    let both = error("sterna receive --qmp q --libvirt --listen h:1 --insecure");
    assert!(both.contains("cannot be used with"), "{both}");
    let alone = error("sterna receive --qmp q --xml f --listen h:1 --insecure");
    assert!(alone.contains("cannot be used with"), "{alone}");
}

#[test]
fn what_is_missing_or_unknown_is_named() {
    assert_eq!(
        error("sterna send"),
        "the following required arguments were not provided: --to <HOST:PORT>, --qmp <PATH>"
    );
    assert_eq!(
        error("sterna send --qmp q --to h:1 --chanels 3"),
        "unexpected argument '--chanels' found (a similar argument exists: '--channels')"
    );
    assert_eq!(error("sterna sendd"), "unrecognized subcommand 'sendd' (a similar subcommand exists: 'send')");
    assert!(error("sterna recover 12").contains("expected 32 hexadecimal digits"));
}

#[test]
fn help_is_no_error() {
    for line in ["sterna --help", "sterna --version", "sterna", "sterna proxy", "sterna send --help"] {
        let error = Cli::try_parse_from(line.split_whitespace()).unwrap_err();
        assert_eq!(usage_error(&error), None, "{line}");
    }
}

#[test]
fn addresses_are_a_host_and_a_port() {
    for good in ["dst-host:4920", "192.0.2.7:1", "[2001:db8::7]:65535", "[fe80::1%eth0]:4920"] {
        assert_eq!(peer_address(good).as_deref(), Ok(good));
    }
    for (bad, reason) in [
        ("4920", "the port is missing"),
        (":4920", "the host is missing"),
        ("2001:db8::7:4920", "must be in brackets"),
        ("[2001:db8::7]4920", "must be in brackets"),
        ("[host]:4920", "no IPv6 address"),
        ("[]:4920", "no IPv6 address"),
        ("tcp://host:4920", "must be in brackets"),
        ("host/x:4920", "no host and port"),
        ("host:", "number from 1 to 65535"),
        ("host:0", "number from 1 to 65535"),
        ("host:+1", "number from 1 to 65535"),
        ("host:65536", "number from 1 to 65535"),
        ("host:http", "number from 1 to 65535"),
    ] {
        let error = peer_address(bad).unwrap_err();
        assert!(error.contains(reason) && error.contains("dst-host:4920"), "{bad}: {error}");
    }
    assert_eq!(listen_address("0.0.0.0:0").as_deref(), Ok("0.0.0.0:0"));
    assert_eq!(listen_address("[fe80::1%eth0]:0").as_deref(), Ok("[fe80::1%eth0]:0"));
    for parse in [peer_address, listen_address] {
        let error = parse("[fe80::1]:4920").unwrap_err();
        assert!(error.contains("network interface") && error.contains("[fe80::1%eth0]:4920"), "{error}");
    }
    assert!(listen_address(":4920").unwrap_err().contains("0.0.0.0:4920"));
}

#[test]
fn opaque_names_are_bounded_in_length_and_number() {
    assert!(opaque("=path").is_err() && opaque("name=").is_err() && opaque("a\x1bb=path").is_err());
    assert!(opaque(&format!("{}=p", "n".repeat(MAX_NAME))).is_ok());
    assert!(opaque(&format!("{}=p", "n".repeat(MAX_NAME + 1))).is_err());
    let many = (0..=MAX_SOCKETS).map(|index| (index.to_string(), PathBuf::from("p")));
    let args = OpaqueArgs { sockets: many.collect() };
    assert_eq!(args.checked().unwrap_err(), "--opaque can be given at most 256 times");
}

#[test]
fn another_name_for_the_certificate_needs_tls_and_a_side_that_connects() {
    let parses = |line: &str| Cli::try_parse_from(line.split_whitespace()).is_ok();
    let send = "sterna send --qmp q --to host:4920 --tls-server-name host.example";
    assert!(parses(&format!("{send} --tls certs")));
    assert!(!parses(send) && !parses(&format!("{send} --insecure")));
    let recover = format!("sterna recover {} --tls certs --tls-server-name host.example", "0".repeat(32));
    assert!(parses(&recover) && !parses(&format!("{recover} --allow another")));
}
