//! Scripted faults by address, on top of another memory.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::{AddressSpace, Fault, Translations};

/// Accesses that fault although the underlying memory would not.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Addresses.
    pub range: Range<u64>,
    /// Only writes, only reads, or (None) both.
    pub write: Option<bool>,
    /// Number of accesses to the range that succeed first.
    pub after: u64,
    /// Number of accesses that fault then; later ones succeed again.
    pub times: u64,
    /// Whether a page request resolves the fault.
    pub resolvable: bool,
}

impl Rule {
    /// Returns a rule by which every access to the range faults and cannot be resolved.
    pub fn always(range: Range<u64>) -> Rule {
        Rule { range, write: None, after: 0, times: u64::MAX, resolvable: false }
    }
}

/// A memory with rules.
#[derive(Debug)]
pub struct ScriptedMemory {
    below: Arc<dyn AddressSpace>,
    rules: Mutex<Vec<Rule>>,
}

impl ScriptedMemory {
    /// Returns a memory without rules.
    pub fn new(below: Arc<dyn AddressSpace>) -> ScriptedMemory {
        ScriptedMemory { below, rules: Mutex::default() }
    }

    /// Adds a rule.
    pub fn add(&self, rule: Rule) {
        self.rules.lock().unwrap().push(rule);
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.rules.lock().unwrap().clear();
    }

    /// Returns the first address of the access that faults.
    fn fault(&self, address: u64, bytes: usize, write: bool) -> Option<u64> {
        let end = address.saturating_add(bytes as u64);
        let mut first = None;
        for rule in self.rules.lock().unwrap().iter_mut() {
            let start = rule.range.start.max(address);
            let matches = start < rule.range.end.min(end) && rule.write.is_none_or(|only| only == write);
            if !matches || rule.times == 0 {
                continue;
            }
            if rule.after > 0 {
                rule.after -= 1;
                continue;
            }
            rule.times = if rule.times == u64::MAX { rule.times } else { rule.times - 1 };
            first = Some(first.map_or(start, |known: u64| known.min(start)));
        }
        first
    }
}

impl AddressSpace for ScriptedMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<u32, Fault> {
        match self.fault(address, into.len(), false) {
            None => self.below.read(address, into),
            Some(at) => {
                let done = (at - address) as usize;
                self.below.read(address, &mut into[..done])?;
                Err(Fault { address: at, done })
            }
        }
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<u32, Fault> {
        match self.fault(address, from.len(), true) {
            None => self.below.write(address, from),
            Some(at) => {
                let done = (at - address) as usize;
                self.below.write(address, &from[..done])?;
                Err(Fault { address: at, done })
            }
        }
    }

    fn resolve(&self, address: u64, write: bool) -> bool {
        let mut rules = self.rules.lock().unwrap();
        for rule in rules.iter_mut() {
            if rule.range.contains(&address) && rule.write.is_none_or(|only| only == write) && rule.times > 0 {
                if !rule.resolvable {
                    return false;
                }
                // The page is present from now on.
                rule.times = 0;
            }
        }
        drop(rules);
        self.below.resolve(address, write)
    }

    fn write_record(&self, address: u64, record: &[u8]) -> Result<u32, Fault> {
        match self.fault(address, record.len(), true) {
            None => self.below.write_record(address, record),
            Some(at) => Err(Fault { address: at, done: 0 }),
        }
    }

    fn translations(&self) -> Translations {
        self.below.translations()
    }
}
