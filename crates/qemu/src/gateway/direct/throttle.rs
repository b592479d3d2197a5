//! Slows a source QEMU's guest down from outside: holds its vCPU threads by ptrace(2) for slices of time
//! (`sterna-attach`).
//!
//! **Why not `cpu.max`** of the threads' control group: the limit would outlive a killed Sterna, and the guest would
//! stay slow for ever. It also needs a control group for the vCPU threads alone, which libvirt makes and other programs
//! do not. The kernel releases threads held by ptrace(2) when the tracer ends, and direct mode needs the rights for
//! ptrace(2) anyway.
//!
//! **A held thread has no lock.** A vCPU thread held while it has QEMU's big lock would stop QEMU's main loop, and its
//! monitor with it. So a thread is held only where it certainly has no lock:
//!
//! * in the ioctl `KVM_RUN`, which QEMU enters without the lock (`kvm_cpu_exec` in accel/kvm/kvm-all.c), also while the
//!   guest's vCPU is halted. The ioctl returns `EINTR`, as for any signal, and QEMU enters it again;
//! * under TCG, in translated code (`cpu_exec_loop` in accel/tcg/cpu-exec.c takes the lock for interrupts only, and
//!   releases it). The translated code is executable memory without a file, or of the memfd `tcg-jit` if it has a
//!   separate writable mapping (`alloc_code_gen_buffer` in tcg/region.c). Helpers, translation and devices are code of
//!   QEMU's own file.
//!
//! A thread that is elsewhere runs on and is stopped again 0.1 to 1 ms later, as long as the slice lasts. TCG's
//! interpreter translates nothing, so a QEMU built with it is not slowed down.
//!
//! Plugging a vCPU in or out ends the throttling: the guest runs at full speed, and the migration goes on.

use std::fs;
use std::ops::Range;

use libc::c_long;
use sterna_attach::{AttachError, Process, Slowdown, StoppedAt};

use crate::qmp::Qmp;
use crate::vcpus;

/// `KVM_RUN`: `_IO(KVMIO, 0x80)` in `include/uapi/linux/kvm.h`.
const KVM_RUN: u32 = 0xAE80;
/// The file of translated code that is mapped twice, once writable and once executable.
const SPLIT_CODE: &str = "/memfd:tcg-jit";

/// Holds the vCPUs of a QEMU for a share of the time. Once this is dropped, the guest runs at full speed and no thread
/// of QEMU is traced.
#[derive(Debug)]
pub(super) struct VcpuThrottle {
    slowdown: Slowdown,
    /// The numbers of the vCPU threads in QEMU's own pid namespace.
    vcpus: Vec<i32>,
}

impl VcpuThrottle {
    /// Holds the vCPUs for `percent` of the time, 1 to 99.
    ///
    /// # Errors
    /// Why the vCPUs cannot be held. The guest runs at full speed.
    pub(super) fn begin(qmp: &Qmp, percent: u8) -> Result<Self, String> {
        let vcpus = vcpus::listed(qmp)?;
        let pid = qmp.peer_pid().ok_or("the QEMU process cannot be seen from here (another pid namespace)")?;
        let process = Process::open(pid).map_err(|error| error.to_string())?;
        let translated = translated_code(&read(pid, "maps")?);
        let may_hold = move |at: &StoppedAt| is_in_guest(at, &translated);
        let slowdown = process.slow_down(&vcpus::threads(pid, &vcpus)?, percent, may_hold);
        Ok(Self { slowdown: slowdown.map_err(|error| failed(&error))?, vcpus })
    }

    /// Changes the share of the time to `percent`, 1 to 99.
    ///
    /// # Errors
    /// Why the vCPUs are not held any more. The guest runs at full speed.
    pub(super) fn set(self, qmp: &Qmp, percent: u8) -> Result<Self, String> {
        if vcpus::listed(qmp)? != self.vcpus {
            return Err("the guest's vCPUs are not those that it had before: one was plugged in or out".into());
        }
        let slowdown = self.slowdown.set(percent).map_err(|error| failed(&error))?;
        Ok(Self { slowdown, ..self })
    }
}

fn failed(error: &AttachError) -> String {
    match error {
        AttachError::ThreadEnded { tid, .. } => {
            format!("the thread {tid} of a vCPU has ended: the vCPU was plugged out")
        }
        error => error.to_string(),
    }
}

/// Returns the address ranges of TCG's translated code, from `/proc/PID/maps`.
fn translated_code(maps: &str) -> Vec<Range<u64>> {
    let range = |line: &str| {
        let mut words = line.split_whitespace();
        let (range, permissions) = (words.next()?, words.next()?);
        let inode = words.nth(2)?;
        let name = words.next();
        let translated = match name {
            None => inode == "0",
            Some(name) => name.starts_with(SPLIT_CODE),
        };
        if permissions.as_bytes().get(2) != Some(&b'x') || !translated {
            return None;
        }
        let (start, end) = range.split_once('-')?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    maps.lines().filter_map(range).collect()
}

/// Returns whether a vCPU thread stopped at `at` runs guest code, or is in `KVM_RUN`: then it has no lock of QEMU's.
fn is_in_guest(at: &StoppedAt, translated: &[Range<u64>]) -> bool {
    const IOCTL: c_long = libc::SYS_ioctl;
    match at.system_call {
        // The kernel takes 32 bits for the request.
        Some((number, [_, request, ..])) => number == IOCTL && request as u32 == KVM_RUN,
        None => translated.iter().any(|range| range.contains(&at.instruction)),
    }
}

fn read(pid: i32, file: &str) -> Result<String, String> {
    fs::read_to_string(format!("/proc/{pid}/{file}")).map_err(|error| format!("/proc/{pid}/{file}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c0000000-55d0c0400000 r-xp 00000000 fe:00 131 /usr/bin/qemu-system-x86_64
7f0000000000-7f0000021000 rw-p 00000000 00:00 0
7f1000000000-7f103ffff000 rwxp 00000000 00:00 0
7f2000000000-7f2000001000 r-xs 00000000 00:01 42 /memfd:tcg-jit (deleted)
7f2000001000-7f2000002000 rw-s 00000000 00:01 42 /memfd:tcg-jit (deleted)
7f3000000000-7f3000001000 r-xp 00000000 00:01 43 /memfd:other (deleted)
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0 [vdso]
";

    fn user_code(instruction: u64) -> StoppedAt {
        StoppedAt { instruction, system_call: None }
    }

    #[test]
    fn a_vcpu_is_held_in_translated_code_and_not_in_qemus_own() {
        let translated = translated_code(MAPS);
        for inside in [0x7f10_0000_0000, 0x7f10_3fff_effe, 0x7f20_0000_0800] {
            assert!(is_in_guest(&user_code(inside), &translated), "{inside:#x}");
        }
        for outside in [0x55d0_c000_1000, 0x7f00_0000_0000, 0x7f20_0000_1000, 0x7f30_0000_0000, 0x7ffd_0000_0000] {
            assert!(!is_in_guest(&user_code(outside), &translated), "{outside:#x}");
        }
    }

    #[test]
    fn a_vcpu_is_held_in_kvm_run_and_in_no_other_system_call() {
        let call = |number, request| StoppedAt {
            instruction: 0x7f10_0000_0000,
            system_call: Some((number, [9, request, 0, 0, 0, 0])),
        };
        let translated = translated_code(MAPS);
        assert!(is_in_guest(&call(libc::SYS_ioctl, 0xAE80), &translated));
        // KVM_GET_REGS; waiting for the big lock; a `read` with the same number.
        for (number, request) in [(libc::SYS_ioctl, 0x8090_ae81), (libc::SYS_futex, 0x80), (libc::SYS_read, 0xAE80)] {
            assert!(!is_in_guest(&call(number, request), &translated), "{number} {request:#x}");
        }
    }
}
