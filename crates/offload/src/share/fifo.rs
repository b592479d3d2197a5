//! No sharing: everything goes to the hardware at once. The baseline for the other shares.

use super::{AdmissionDecision, AdmissionRequest, Grant, Nanos, Share};

/// Admits everything.
#[derive(Debug, Default)]
pub struct Fifo;

impl Share for Fifo {
    fn ask(&mut self, request: &AdmissionRequest, _now: Nanos) -> AdmissionDecision {
        AdmissionDecision::Admit(Grant {
            vm: request.vm,
            predicted: request.predicted,
            bytes: request.bytes,
            expected: 0,
        })
    }

    fn done(&mut self, _grant: Grant, _sojourn: Nanos, _now: Nanos) {}

    fn dropped(&mut self, _grant: Grant) {}
}
