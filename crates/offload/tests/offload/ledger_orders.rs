//! Every order in which two processes can read and write the ledger's words, as loom explores them: words are
//! atomics without order among each other, so a reader may see any mixture of old and new.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use sterna_offload::share::ledger::{Ledger, Slot, Table};
use sterna_offload::share::{AdmissionDecision, AdmissionRequest, IN_FLIGHT, Nanos, Share};

const PROCESSES: usize = 2;
const BATCH: Nanos = 200_000;
/// More would not change a decision: the first words of a slot are what is decided by.
type Words = [AtomicU64; 7];

#[derive(Clone, Debug)]
struct Shared {
    words: Arc<[Words; PROCESSES]>,
    own: usize,
}

impl Table for Shared {
    fn slots(&self) -> usize {
        PROCESSES
    }
    fn own(&self) -> usize {
        self.own
    }
    fn read(&self, slots: &mut [Slot]) {
        for (index, slot) in slots.iter_mut().enumerate() {
            if index != self.own {
                *slot = Slot::from_words(std::array::from_fn(|word| self.words[index][word].load(Ordering::Relaxed)));
            }
        }
    }
    fn write(&self, slot: &Slot) {
        for (word, value) in self.words[self.own].iter().zip(slot.words()) {
            word.store(value, Ordering::Relaxed);
        }
    }
    fn alive(&self, _index: usize) -> bool {
        true
    }
}

/// Asks until it was let in once, and says how much was in use then.
fn one_batch(mut ledger: Ledger<Shared>, in_use: &AtomicU64, now: Nanos) -> Ledger<Shared> {
    let what = AdmissionRequest { vm: 0, channel: 0, weight: 1, predicted: BATCH, bytes: 4096 };
    if let AdmissionDecision::Admit(grant) = ledger.ask(&what, now) {
        let most = in_use.fetch_add(BATCH, Ordering::SeqCst) + BATCH;
        assert!(most <= IN_FLIGHT + (PROCESSES as u64 - 1) * BATCH, "{most} in flight");
        in_use.fetch_sub(BATCH, Ordering::SeqCst);
        ledger.done(grant, BATCH, now);
    }
    ledger
}

#[test]
fn whatever_is_seen_of_the_others_words_little_more_than_the_bound_goes_in_and_nobody_is_shut_out() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.max_duration = Some(std::time::Duration::from_secs(20));
    model.check(|| {
        let words: Arc<[Words; PROCESSES]> =
            Arc::new(std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))));
        let in_use = Arc::new(AtomicU64::new(0));
        let ledger = |own| Ledger::new(Shared { words: Arc::clone(&words), own });
        let (first, second) = (ledger(0), ledger(1));
        let other = {
            let in_use = Arc::clone(&in_use);
            loom::thread::spawn(move || drop(one_batch(second, &in_use, 1_000_000)))
        };
        let mut first = one_batch(first, &in_use, 1_000_000);
        other.join().unwrap();
        assert_eq!(in_use.load(Ordering::SeqCst), 0);
        // The other is gone, and with it whatever it said.
        let what = AdmissionRequest { vm: 0, channel: 0, weight: 1, predicted: BATCH, bytes: 4096 };
        assert!(matches!(first.ask(&what, 1_000_001), AdmissionDecision::Admit(_)));
    });
}
