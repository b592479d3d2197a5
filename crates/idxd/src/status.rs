//! The status that a device reports for a descriptor: every operation status code of the two specifications, with its
//! text.
//!
//! DSA and IAA share one table here because they share the field: where both define a code it means the same, and the
//! codes that only one of them defines do not collide. Sources: Intel DSA architecture specification rev. 3.0, tables
//! 5-6 and 5-7; Intel IAA architecture specification, table 4-7.

use std::fmt;

macro_rules! statuses {
    ($($code:literal $name:ident $words:literal;)*) => {
        /// The operation status of a completion record (bits 5:0 of its first byte; bit 7 is part of [`Fault`](crate::Fault)).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Status {
            $(#[doc = $words] $name,)*
            /// A code that neither specification defines.
            Unknown(u8),
        }

        impl Status {
            /// Every code the specifications define, in ascending order.
            pub const ALL: &'static [Status] = &[$(Status::$name),*];

            /// Returns the status of a code without its read/write bit. Zero ("not written yet") and undefined codes
            /// are [`Status::Unknown`].
            pub const fn from_code(code: u8) -> Status {
                match code {
                    $($code => Status::$name,)*
                    other => Status::Unknown(other),
                }
            }

            /// Returns the code as a device writes it, without the read/write bit.
            pub const fn code(self) -> u8 {
                match self {
                    $(Status::$name => $code,)*
                    Status::Unknown(code) => code,
                }
            }

            /// Returns the specification's description, as one sentence.
            pub const fn description(self) -> &'static str {
                match self {
                    $(Status::$name => $words,)*
                    Status::Unknown(_) => "A status code that the specification does not define.",
                }
            }
        }
    };
}

statuses! {
    0x01 Success "Success.";
    0x02 FalsePredicate "Success with false predicate: done, and the result is not the expected one.";
    0x03 PageFault "Partial completion due to a page fault; the descriptor does not block on faults.";
    0x04 PageRequestFailed "Partial completion: the page request was answered as invalid, or was retried too often.";
    0x05 BatchMemberFailed "One or more operations of the batch completed with a status other than success.";
    0x06 BatchListFault "Partial completion of a batch: page fault on the descriptor list.";
    0x07 DeltaOffsetOrder "The offsets of the delta record are not in increasing order.";
    0x08 DeltaOffsetRange "An offset of the delta record lies at or beyond the transfer size.";
    0x09 DifError "Data integrity field error.";
    0x0a AnalyticsError "Analytics error (IAA); the error code says which.";
    0x0b OutputOverflow "The output does not fit the destination (IAA).";
    0x10 BadOperation "Unsupported operation code.";
    0x11 BadFlags "Invalid flags; the record's invalid-flags field names at least one.";
    0x12 ReservedNotZero "A reserved field is not zero.";
    0x13 BadSize "Invalid transfer size: zero, above the work queue's maximum, or above what the operation allows.";
    0x14 BadCount "Descriptor count out of range.";
    0x15 BadValue "Unsupported value of a field other than the flags, for example a delta record size.";
    0x16 Overlap "Overlapping buffers.";
    0x17 DualcastBits "The low bits of the two destinations of a dualcast differ.";
    0x18 ListAlignment "The descriptor list is not 64-byte aligned.";
    0x19 BadInterruptHandle "Invalid completion interrupt handle.";
    0x1a RecordFault "Page fault on the completion record (event log or software error register only).";
    0x1b RecordAlignment "The completion record is misaligned (event log or software error register only).";
    0x1c Alignment "Misaligned address, size or stride.";
    0x1d Privilege "A privileged descriptor on a device without privileged mode.";
    0x1e TrafficClass "Incorrect traffic class configuration.";
    0x1f ReadbackFault "Page fault on the readback address of a drain.";
    0x20 HardwareError "Hardware error, other than on a write or an address translation.";
    0x21 WriteError "Hardware error on a memory write or a destination readback.";
    0x22 TranslationError "Error during address translation.";
    0x23 PageRequestTimeout "Time-out waiting for the response to a page request (IAA).";
    0x24 Watchdog "The watchdog timer expired without progress (IAA).";
    0x26 DrainRecordFault "A record before a drain may have met a page fault (event log only).";
    0x27 BatchRecordFault "A record of the batch may have met a page fault (event log only).";
    0x28 InterDomainNoPasid "Inter-domain operation on a work queue without PASID.";
    0x29 InterDomainHandle "Invalid inter-domain permissions table handle.";
    0x2a InterDomainPermission "Inter-domain operation without the permission for its access.";
    0x2b InterDomainWindow "Inter-domain operation outside the address window.";
    0x2c WindowHandle "Update window: an entry that is invalid, not modifiable or not the submitter's.";
    0x2d WindowControl "Update window: invalid window control fields.";
    0x2e InterDomainAborted "Inter-domain operation aborted: the domain is not accessible.";
    0x30 BadOperationFlags "Invalid flag in bytes 38 and 39: compression, decompression or CRC flags (IAA).";
    0x31 BadFilterFlags "Invalid flag in bytes 56 to 59: filter or second compression flags (IAA).";
    0x32 BadInputSize "Invalid input size: odd where 16-bit words are read (IAA).";
    0x33 BadElementCount "Invalid number of elements (IAA).";
    0x34 BadSourceWidth "Invalid width of source 1 (IAA).";
    0x35 BadInvertOutput "Invert output, where the output is not a bit vector (IAA).";
}

/// Bits of the status byte that are the code (DSA table 8-10: bit 6 is unused, bit 7 says read or write).
pub(crate) const CODE_BITS: u8 = 0x3f;
/// Bit of the status byte that is set if the faulting access was a write.
pub(crate) const WRITE_BIT: u8 = 0x80;

impl Status {
    /// Returns whether the operation was done in full: success, with or without the expected result.
    pub const fn is_done(self) -> bool {
        matches!(self, Status::Success | Status::FalsePredicate)
    }

    /// Returns whether the operation completed *and* with the expected result. A false predicate (02) is **not** a
    /// success: it is how a batch with expected results reports that one was wrong.
    pub const fn is_success(self) -> bool {
        matches!(self, Status::Success)
    }

    /// Returns whether data of the operation could not be accessed, so that it completed in part: the rest can be
    /// resumed ([`resume`](crate::resume)) or done by the CPU.
    pub const fn is_page_fault(self) -> bool {
        matches!(self, Status::PageFault | Status::PageRequestFailed | Status::BatchListFault)
    }

    /// Returns whether the record's fault address and the read/write bit have a meaning (DSA table 8-10, IAA table
    /// 6-5).
    pub const fn has_fault_address(self) -> bool {
        matches!(
            self,
            Status::PageFault
                | Status::PageRequestFailed
                | Status::BatchListFault
                | Status::RecordFault
                | Status::ReadbackFault
        )
    }

    /// Returns whether the device's checks refused the descriptor itself: sending it again cannot help.
    pub const fn is_rejected(self) -> bool {
        matches!(self.code(), 0x10..=0x1e | 0x28..=0x2d | 0x30..=0x35)
    }

    /// Returns whether the device or the fabric failed, whatever the descriptor.
    pub const fn is_hardware_error(self) -> bool {
        matches!(self.code(), 0x20..=0x24)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status {:#04x}: {}", self.code(), self.description())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_go_both_ways_for_all_bytes() {
        for code in 0..=u8::MAX {
            assert_eq!(Status::from_code(code).code(), code);
        }
        assert!(Status::ALL.windows(2).all(|pair| pair[0].code() < pair[1].code()));
        assert!(Status::ALL.iter().all(|status| status.code() <= CODE_BITS));
    }

    #[test]
    fn zero_and_the_gaps_of_the_tables_are_unknown() {
        for code in [0x00, 0x0c, 0x0f, 0x25, 0x2f, 0x36, 0x3f, 0x80, 0xff] {
            assert_eq!(Status::from_code(code), Status::Unknown(code));
        }
    }

    #[test]
    fn a_false_predicate_is_done_but_no_success() {
        assert!(Status::FalsePredicate.is_done());
        assert!(!Status::FalsePredicate.is_success());
        assert!(Status::Success.is_success());
        for status in Status::ALL {
            assert_eq!(status.is_done(), matches!(status.code(), 1 | 2), "{status}");
        }
    }

    #[test]
    fn faults_rejections_and_hardware_errors_do_not_overlap() {
        for &status in Status::ALL {
            let kinds = [status.is_done(), status.is_page_fault(), status.is_rejected(), status.is_hardware_error()];
            assert!(kinds.iter().filter(|kind| **kind).count() <= 1, "{status}");
        }
        let faults: Vec<u8> = Status::ALL.iter().filter(|s| s.has_fault_address()).map(|s| s.code()).collect();
        assert_eq!(faults, [0x03, 0x04, 0x06, 0x1a, 0x1f]);
    }
}
