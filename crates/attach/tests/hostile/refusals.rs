//! Processes that cannot be traced, or only with care: refused with the reason, and left unchanged.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

use sterna_attach::{AttachError, Process, UserfaultOrigin, take_userfault};

use crate::target::Target;

pub(crate) const CASES: &[(&str, fn())] = &[
    ("numbers_that_mean_no_other_process_are_refused", no_process),
    ("a_traced_process_is_refused_and_its_tracer_named", traced),
    ("seccomp_is_suspended_for_our_calls", seccomp_is_suspended),
    ("without_the_right_to_suspend_seccomp_nothing_is_run", seccomp_is_respected),
    ("a_process_without_rights_of_its_own_is_worked_with", confined),
    ("without_the_right_to_trace_the_words_say_what_to_do", not_permitted),
    ("a_process_of_32_bits_is_refused", thirty_two_bits),
    ("a_process_that_may_open_no_descriptor_is_refused", no_descriptor_there),
    ("a_descriptor_that_cannot_be_taken_is_closed_there", descriptor_cannot_be_taken),
    ("a_frozen_process_is_put_back_after_a_time_limit", frozen),
    ("a_process_whose_main_thread_has_ended_is_refused", main_thread_ended),
    ("a_program_whose_calls_are_sent_back_to_it_is_refused", dispatched),
];

fn no_process() {
    let kinds = |pid| Process::open(pid).unwrap_err();
    assert!(matches!(kinds(0), AttachError::NoProcess { .. }));
    assert!(matches!(kinds(-1), AttachError::NoProcess { .. }));
    assert!(matches!(kinds(i32::MAX), AttachError::NoProcess { .. }));
    assert!(matches!(kinds(std::process::id() as i32), AttachError::Myself { .. }));
    let mut target = Target::start(&["endless", "futex"]);
    let thread = std::fs::read_dir(format!("/proc/{}/task", target.pid()))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().parse::<i32>().unwrap())
        .find(|&thread| thread != target.pid())
        .unwrap();
    let error = kinds(thread);
    println!("  {error}");
    assert!(matches!(error, AttachError::NotAProcess { .. }));
    let process = target.hold();
    target.wait_for_call(libc::SYS_futex);
    target.tell("go");
    assert_eq!(target.finish(), "0 0");
    assert!(process.has_ended());
    assert!(matches!(take_userfault(&process, UserfaultOrigin::SystemCall), Err(AttachError::Ended { .. })));
}

fn traced() {
    let mut target = Target::start(&["endless", "read"]);
    let tracer = Target::start(&["tracer", &target.pid().to_string()]);
    let error = target.cannot_take();
    assert!(
        matches!(&error, AttachError::AlreadyTraced { tracer: found, name, .. } if *found == tracer.pid() && name.starts_with("hostile"))
    );
    tracer.finish();
    target.wait_until(|target| target.status("TracerPid") == "0");
    target.take(1);
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

const ACTIONS: [&str; 5] = ["errno", "trap", "kill-thread", "kill-process", "strict"];

fn seccomp_is_suspended() {
    for action in ACTIONS {
        let mut target = Target::start(&["seccomp", action]);
        assert_eq!(target.line(), "armed");
        let process = target.hold();
        match take_userfault(&process, UserfaultOrigin::SystemCall) {
            Ok(taken) => target.note(&taken),
            Err(error @ AttachError::Seccomp { .. }) => println!("skipped: {error}"),
            Err(error) => panic!("{action}: {error}"),
        }
        target.tell("x");
        assert_eq!(target.finish(), "alive", "{action}");
    }
}

fn seccomp_is_respected() {
    for action in ACTIONS {
        let mut target = Target::start(&["seccomp", action]);
        assert_eq!(target.line(), "armed");
        let result = Target::start(&["attacher", "without-admin", &target.pid().to_string()]).finish();
        println!("  {result}");
        assert!(result.starts_with("Seccomp: "), "{result}");
        target.tell("x");
        assert_eq!(target.finish(), "alive", "{action}");
    }
    // A process without a filter needs no such right.
    let mut target = Target::start(&["endless", "read"]);
    assert_eq!(Target::start(&["attacher", "without-admin", &target.pid().to_string()]).finish(), "taken");
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

fn confined() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root may trace such processes");
        return;
    }
    for how in ["nobody", "namespace", "undumpable"] {
        let mut target = Target::start(&["confined", how]);
        if target.ready.is_empty() {
            target.take(3);
        } else {
            println!("skipped: {how}: {}", target.ready);
        }
        target.tell("go");
        assert_eq!(target.finish(), "3 0", "{how}");
    }
}

fn not_permitted() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return;
    }
    let mut target = Target::start(&["endless", "read"]);
    let result = Target::start(&["attacher", "as-nobody", &target.pid().to_string()]).finish();
    println!("  {result}");
    assert!(
        result.starts_with("NotPermitted: ") && result.contains("user 65534") && result.contains("run as root"),
        "{result}"
    );
    target.tell("go");
    assert_eq!(target.finish(), "3 0");
}

/// A 32-bit program of 14 bytes: writes "ready", then pauses for ever.
fn thirty_two_bits() {
    let code: Vec<u8> = [
        &[0xb8, 4, 0, 0, 0, 0xbb, 1, 0, 0, 0, 0xb9][..], // mov eax, 4 (write); mov ebx, 1; mov ecx, text
        &(0x0010_0000_u32 + 0x74).to_le_bytes(),
        &[0xba, 6, 0, 0, 0, 0xcd, 0x80],              // mov edx, 6; int 0x80
        &[0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7], // mov eax, 29 (pause); int 0x80; back
    ]
    .concat();
    let base = 0x0010_0000_u32;
    let length = 0x7a + code.len() as u32;
    let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    for half in [2_u16, 3] {
        file.extend(half.to_le_bytes());
    }
    for word in [1, base + 0x7a, 52, 0, 0] {
        file.extend(word.to_le_bytes());
    }
    for half in [52_u16, 32, 1, 0, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    for word in [1, 0, base, base, length, length, 5, 0x1000] {
        file.extend(word.to_le_bytes());
    }
    file.resize(0x74, 0);
    file.extend(b"ready\n");
    file.extend(code);
    let path = std::env::temp_dir().join(format!("sterna-attach-32-{}", std::process::id()));
    std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o700)
        .open(&path)
        .unwrap()
        .write_all(&file)
        .unwrap();
    let runs = Command::new(&path).stdin(Stdio::null()).stdout(Stdio::null()).spawn().map(|mut child| {
        let _ = child.kill();
        let _ = child.wait();
    });
    if let Err(error) = runs {
        std::fs::remove_file(&path).unwrap();
        println!("skipped: this kernel runs no 32-bit programs: {error}");
        return;
    }
    let target = Target::start_command(Command::new(&path));
    std::fs::remove_file(&path).unwrap();
    let error = target.cannot_take();
    assert!(matches!(error, AttachError::ThirtyTwoBit { .. }));
    assert_eq!(target.status("TracerPid"), "0");
    target.kill();
}

fn no_descriptor_there() {
    let mut target = Target::start(&["full"]);
    let error = target.cannot_take();
    assert!(matches!(&error, AttachError::Refused { source, .. } if source.raw_os_error() == Some(libc::EMFILE)));
    target.tell("go");
    assert_eq!(target.finish(), "done");
}

fn descriptor_cannot_be_taken() {
    for (how, expected) in [("without-getfd", "Kernel: this kernel has no pidfd_getfd"), ("without-room", "Refused: ")]
    {
        let mut target = Target::start(&["endless", "read"]);
        let before = target.descriptors();
        let result = Target::start(&["attacher", how, &target.pid().to_string()]).finish();
        println!("  {result}");
        assert!(result.starts_with(expected), "{result}");
        assert_eq!(target.descriptors(), before);
        assert_eq!(target.status("TracerPid"), "0");
        target.tell("go");
        assert_eq!(target.finish(), "3 0");
    }
}

fn frozen() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let hierarchy = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|words| words[2] == "cgroup2");
    let Some(hierarchy) = hierarchy else {
        println!("skipped: no control groups of version 2 are mounted");
        return;
    };
    let group = std::path::Path::new(hierarchy[1]).join(format!("sterna-attach-{}", std::process::id()));
    if let Err(error) = std::fs::create_dir(&group) {
        println!("skipped: no control group can be made: {error}");
        return;
    }
    let set = |file: &str, value: &str| std::fs::write(group.join(file), value);
    let mut target = Target::start(&["endless", "read"]);
    target.wait_for_call(libc::SYS_read);
    if let Err(error) = set("cgroup.procs", &target.pid().to_string()).and_then(|()| set("cgroup.freeze", "1")) {
        std::fs::remove_dir(&group).unwrap();
        println!("skipped: no process can be frozen: {error}");
        return;
    }
    target.wait_until(|_| std::fs::read_to_string(group.join("cgroup.events")).unwrap().contains("frozen 1"));
    let error = target.cannot_take();
    assert_eq!(target.status("TracerPid"), "0");
    set("cgroup.freeze", "0").unwrap();
    target.tell("go");
    let result = target.finish();
    std::fs::remove_dir(&group).unwrap();
    assert_eq!(result, "3 0");
    assert!(matches!(error, AttachError::Unsettled { .. }), "{error}");
}

fn main_thread_ended() {
    let mut target = Target::start(&["main-thread-ended"]);
    target.wait_until(|target| target.status("State").starts_with('Z'));
    let error = take_userfault(&target.hold(), UserfaultOrigin::SystemCall).unwrap_err();
    println!("  {error}");
    assert!(matches!(error, AttachError::MainThreadEnded { .. }));
    target.tell("go");
    assert_eq!(target.finish(), "done");
}

fn dispatched() {
    let mut target = Target::start(&["dispatched"]);
    let error = target.cannot_take();
    assert!(matches!(error, AttachError::NoInstruction { .. }));
    target.tell("go");
    assert_eq!(target.finish(), "0");
}
