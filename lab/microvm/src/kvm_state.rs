//! The state of a vCPU: read from KVM, serialised, checked and loaded into KVM again.
//!
//! It contains everything of a vCPU that KVM can return and the payload can have changed. KVM has no interrupt controllers here, so
//! there is no state of theirs. A state comes over the network: KVM itself checks the values, which concern only the guest; none of
//! them is an address of this process.

use kvm_bindings::{
    CpuId, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

/// Model specific registers that are moved if KVM has them. `Documentation/virt/kvm/x86/msr.rst` and the processors'
/// manuals: time stamp, its auxiliary value, memory types, and the registers of system calls.
const MSRS: [u32; 11] = [
    0x10,        // IA32_TIME_STAMP_COUNTER
    0x174,       // IA32_SYSENTER_CS
    0x175,       // IA32_SYSENTER_ESP
    0x176,       // IA32_SYSENTER_EIP
    0x1a0,       // IA32_MISC_ENABLE
    0x277,       // IA32_PAT
    0xc000_0081, // IA32_STAR
    0xc000_0082, // IA32_LSTAR
    0xc000_0084, // IA32_FMASK
    0xc000_0102, // IA32_KERNEL_GS_BASE
    0xc000_0103, // IA32_TSC_AUX
];

/// The state of a vCPU. Parts that this KVM cannot return are absent.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KvmVcpuState {
    /// The CPU features that the guest sees.
    cpu_id: Vec<kvm_cpuid_entry2>,
    registers: kvm_regs,
    special: kvm_sregs,
    extended: Option<kvm_xsave>,
    extended_control: Option<kvm_xcrs>,
    debug: Option<kvm_debugregs>,
    msrs: Vec<kvm_msr_entry>,
    run_state: Option<kvm_mp_state>,
    events: Option<kvm_vcpu_events>,
}

/// Returns those of `MSRS` that this KVM has.
pub(crate) fn movable_msrs(kvm: &Kvm) -> Vec<u32> {
    let known = kvm.get_msr_index_list().map(|list| list.as_slice().to_vec()).unwrap_or_default();
    MSRS.into_iter().filter(|number| known.contains(number)).collect()
}

/// Converts an error of KVM, for `map_err`.
fn cannot(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> String {
    move |error| format!("KVM does not {what}: {error}")
}

impl KvmVcpuState {
    /// Reads the state of a paused vCPU without an incomplete exit.
    pub(crate) fn save(vcpu: &VcpuFd, cpu_id: &CpuId, msrs: &[u32]) -> Result<Self, String> {
        Ok(Self {
            cpu_id: cpu_id.as_slice().to_vec(),
            // The order matters little, because the vCPU is paused. Only the run state must be read first: KVM then processes
            // pending events.
            run_state: vcpu.get_mp_state().ok(),
            registers: vcpu.get_regs().map_err(cannot("tell the registers"))?,
            special: vcpu.get_sregs().map_err(cannot("tell the special registers"))?,
            extended: vcpu.get_xsave().ok(),
            extended_control: vcpu.get_xcrs().ok(),
            debug: vcpu.get_debug_regs().ok(),
            msrs: read_msrs(vcpu, msrs),
            events: vcpu.get_vcpu_events().ok(),
        })
    }

    /// Loads the state into a vCPU that never ran, on a host with the features `supported`. Returns the vCPU's features.
    pub(crate) fn load(&self, vcpu: &VcpuFd, supported: &CpuId) -> Result<CpuId, String> {
        check_processor(&self.cpu_id, supported.as_slice())?;
        let cpu_id = CpuId::from_entries(&self.cpu_id).map_err(|_| "it describes too large a processor".to_owned())?;
        // CPUID comes first, since it determines the valid values of the other registers.
        vcpu.set_cpuid2(&cpu_id).map_err(cannot("take the processor"))?;
        if let Some(run_state) = self.run_state {
            vcpu.set_mp_state(run_state).map_err(cannot("take the run state"))?;
        }
        vcpu.set_regs(&self.registers).map_err(cannot("take the registers"))?;
        vcpu.set_sregs(&self.special).map_err(cannot("take the special registers"))?;
        if let Some(control) = &self.extended_control {
            vcpu.set_xcrs(control).map_err(cannot("take the extended control registers"))?;
        }
        if let Some(extended) = &self.extended {
            // SAFETY: KVM reads 4096 bytes, as no feature with more is ever enabled for guests of this process.
            unsafe { vcpu.set_xsave(extended) }.map_err(cannot("take the extended registers"))?;
        }
        if let Some(debug) = &self.debug {
            vcpu.set_debug_regs(debug).map_err(cannot("take the debug registers"))?;
        }
        let msrs = Msrs::from_entries(&self.msrs).map_err(|_| "it has too many registers".to_owned())?;
        let taken = vcpu.set_msrs(&msrs).map_err(cannot("take the model specific registers"))?;
        if let Some(refused) = self.msrs.get(taken) {
            return Err(format!("KVM does not take model specific register {:#x}", refused.index));
        }
        if let Some(events) = &self.events {
            vcpu.set_vcpu_events(events).map_err(cannot("take pending events"))?;
        }
        Ok(cpu_id)
    }
}

/// Reads registers. KVM stops at the first one that it cannot return; that one is left out.
fn read_msrs(vcpu: &VcpuFd, numbers: &[u32]) -> Vec<kvm_msr_entry> {
    let mut found = Vec::new();
    for number in numbers {
        let entry = kvm_msr_entry { index: *number, ..Default::default() };
        if let Ok(mut one) = Msrs::from_entries(&[entry])
            && vcpu.get_msrs(&mut one).is_ok_and(|count| count == 1)
        {
            found.extend_from_slice(one.as_slice());
        }
    }
    found
}

/// Leaves of CPUID whose registers are features, one bit each: (leaf, subleaf, which of eax, ebx, ecx, edx).
const FEATURES: [(u32, u32, [bool; 4]); 5] = [
    (1, 0, [false, false, true, true]),
    (7, 0, [false, true, true, true]),
    (7, 1, [true, false, false, true]),
    (0xd, 0, [true, false, false, true]),
    (0x8000_0001, 0, [false, false, true, true]),
];
/// Bits of leaf 1, ecx, that are no features but state of the guest: whether it has enabled XSAVE.
const OSXSAVE: u32 = 1 << 27;

/// Checks that `host` has all CPU features that the guest sees in `guest`.
fn check_processor(guest: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> Result<(), String> {
    let registers = |entries: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32| {
        let found = entries.iter().find(|entry| entry.function == leaf && entry.index == subleaf);
        found.map_or([0; 4], |entry| [entry.eax, entry.ebx, entry.ecx, entry.edx])
    };
    for (leaf, subleaf, features) in FEATURES {
        let (had, has) = (registers(guest, leaf, subleaf), registers(host, leaf, subleaf));
        for at in 0..4 {
            let state = if leaf == 1 && at == 2 { OSXSAVE } else { 0 };
            let missing = had[at] & !has[at] & !state;
            if features[at] && missing != 0 {
                return Err(format!(
                    "its processor has features that this host's has not: CPUID leaf {leaf:#x}.{subleaf}, register {}, \
                     bits {missing:#x}",
                    ["eax", "ebx", "ecx", "edx"][at]
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_cpu_feature_of_the_guest_is_refused_with_the_reason() {
        let entry = |ebx: u32| kvm_cpuid_entry2 { function: 7, ebx, ..Default::default() };
        assert_eq!(check_processor(&[entry(0b0110)], &[entry(0b1110)]), Ok(()));
        let error = check_processor(&[entry(0b0110)], &[entry(0b1010)]).expect_err("a feature is missing");
        assert!(error.contains("CPUID leaf 0x7.0, register ebx, bits 0x4"), "{error}");
        assert!(check_processor(&[entry(1)], &[]).is_err());
    }
}
