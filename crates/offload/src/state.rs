//! The states of a request, and the permitted transitions. They are defined in one place, so that a request with two
//! owners at once is a panic in a test and not a page that two engines write.
//!
//! ```text
//! free ─> filling ─> queued ─> in device ─> done ─> free
//!            │          │          └─> quarantined ─> free      (once the device is proved quiet)
//!            │          └─> done                                (by the CPU, or cancelled)
//!            └─> free, done                                     (dropped; done by the CPU at once)
//! ```

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// In the pool.
    Free,
    /// The caller has it as a [`Batch`](crate::Batch): it is being filled, or its results are being read.
    Filling,
    /// Submitted; no device has seen it.
    Queued,
    /// A device may be reading its descriptors and writing its records and buffers.
    InDevice,
    /// No device has it; it will be delivered to the caller.
    Done,
    /// A device that is out of service may still write it. It is not read, reused or freed.
    Quarantined,
}

impl State {
    /// Returns whether `next` may follow.
    pub fn may_become(self, next: Self) -> bool {
        use State::{Done, Filling, Free, InDevice, Quarantined, Queued};
        matches!(
            (self, next),
            (Free, Filling)
                | (Filling, Free | Queued | Done)
                | (Queued, InDevice | Done | Filling)
                | (InDevice, Done | Quarantined)
                | (Done, Filling | Free)
                | (Quarantined, Free)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::State::{self, *};

    #[test]
    fn a_request_that_a_device_may_still_write_becomes_neither_free_nor_its_callers() {
        for unsafe_next in [Free, Filling, Queued] {
            assert!(!InDevice.may_become(unsafe_next), "{unsafe_next:?}");
        }
        for next in [Filling, Queued, InDevice, Done] {
            assert!(!Quarantined.may_become(next), "{next:?}");
        }
    }

    #[test]
    fn every_state_is_reached_from_free_and_leads_back_to_it() {
        let all = [Free, Filling, Queued, InDevice, Done, Quarantined];
        let reach = |from: State| {
            let mut seen = vec![from];
            let mut at = 0;
            while at < seen.len() {
                for next in all {
                    if seen[at].may_become(next) && !seen.contains(&next) {
                        seen.push(next);
                    }
                }
                at += 1;
            }
            seen.len()
        };
        assert!(all.into_iter().all(|state| reach(state) == all.len()));
    }
}
