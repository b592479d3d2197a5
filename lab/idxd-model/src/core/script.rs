//! Which scripted faults a descriptor meets.

use super::Nanos;
use super::random::Random;
use crate::config::{Script, ScriptedFault};
use crate::ops::Effects;
use crate::table::dsa::{self, code};

/// A script, and how often descriptors have matched it.
#[derive(Clone, Debug)]
pub(super) struct Active {
    script: Script,
    matched: u64,
    fired: u64,
}

/// All scripted faults of one descriptor.
#[derive(Clone, Debug, Default)]
pub(super) struct Fate {
    pub(super) effects: Effects,
    pub(super) late_data: Option<Nanos>,
    pub(super) late: Nanos,
    pub(super) slow: u32,
    pub(super) hang: bool,
    pub(super) dropped: bool,
    pub(super) halt: bool,
}

impl Active {
    pub(super) fn new(script: Script) -> Active {
        Active { script, matched: 0, fired: 0 }
    }

    fn fires(&mut self, device: &str, queue: &str, operation: u8, random: &mut Random) -> bool {
        let script = &self.script;
        let control = matches!(operation, code::BATCH | code::DRAIN);
        let here = script.device.as_deref().is_none_or(|only| only == device)
            && script.queue.as_deref().is_none_or(|only| only == queue)
            && script.opcode.map_or(!control, |only| only == operation);
        if !here {
            return false;
        }
        let matched = self.matched;
        self.matched += 1;
        let now = script.nth.is_none_or(|nth| nth == matched)
            && script.every.is_none_or(|every| (matched + 1).is_multiple_of(every.max(1)))
            && script.per_mille.is_none_or(|share| random.below(1000) < u64::from(share))
            && script.limit.is_none_or(|limit| self.fired < limit);
        self.fired += u64::from(now);
        now
    }
}

/// Returns the faults that the scripts inject into this descriptor.
pub(super) fn fate(
    scripts: &mut [Active],
    device: &str,
    queue: &str,
    descriptor: &[u8; 64],
    random: &mut Random,
) -> Fate {
    let mut fate = Fate::default();
    if scripts.is_empty() {
        return fate;
    }
    let operation = dsa::OPERATION.get(descriptor) as u8;
    for active in scripts {
        if !active.fires(device, queue, operation, random) {
            continue;
        }
        match active.script.what {
            ScriptedFault::PageFault { per_mille, resolvable } => {
                fate.effects.fault_after = Some(dsa::SIZE.get(descriptor) * u64::from(per_mille) / 1000);
                fate.effects.resolvable = resolvable;
            }
            ScriptedFault::WrongResult => fate.effects.corrupt = true,
            ScriptedFault::LateData { delay_ns } => {
                fate.effects.defer = true;
                fate.late_data = Some(delay_ns);
            }
            ScriptedFault::Late { delay_ns } => {
                fate.effects.defer = true;
                fate.late = fate.late.max(delay_ns);
            }
            ScriptedFault::Slow { factor } => fate.slow = factor.max(1),
            ScriptedFault::Hang => fate.hang = true,
            ScriptedFault::DropCompletion => fate.dropped = true,
            ScriptedFault::Status { code } => fate.effects.status = Some(code),
            ScriptedFault::Halt => fate.halt = true,
        }
    }
    fate
}
