//! Compares the judge with the model's own checks, which are a separate implementation.

use proptest::prelude::*;

use super::*;
use crate::ops::{Limits, check};

fn queue(kind: Kind) -> Queue {
    let (mode, max_transfer) = (Mode::Shared, 1 << 20);
    Queue { kind, version: 0x100, mode, size: 16, max_batch: 32, max_transfer, block_on_fault: false }
}

fn limits(queue: &Queue) -> Limits {
    Limits {
        kind: queue.kind,
        version: queue.version,
        max_transfer: queue.max_transfer,
        max_batch: queue.max_batch,
        block_on_fault: queue.block_on_fault,
        page_requests: true,
        translation: true,
        overlapping_copy: true,
        batch_of_one: queue.version >= 0x200,
        cache_control: true,
        destination_readback: true,
        pattern_granule: 8,
    }
}

/// Descriptors that are often right: small numbers, aligned addresses, few flags.
fn descriptors(kind: Kind) -> impl Strategy<Value = [u8; 64]> {
    let codes = match kind {
        Kind::Dsa => dsa::OPERATIONS.iter().map(|row| row.code).collect::<Vec<_>>(),
        Kind::Iaa => crate::table::iaa::OPERATIONS.iter().map(|row| row.code).collect(),
    };
    let flags = prop_oneof![Just(0x0c_u32), Just(0x1000c), (0_u32..24).prop_map(|bit| 0x0c | 1 << bit)];
    let address = prop_oneof![Just(0_u64), (1_u64..64).prop_map(|at| at << 12), any::<u64>()];
    let size = prop_oneof![Just(0_u64), Just(1568), Just(64), (1_u64..5000), any::<u64>()];
    let fields = (proptest::sample::select(codes), flags, [address.clone(), address.clone(), address.clone(), address]);
    let noise = proptest::option::weighted(0.3, (0_usize..64, any::<u8>()));
    (fields, [size.clone(), size.clone(), size], noise).prop_map(move |((code, flags, at), sizes, noise)| {
        let mut bytes = [0; 64];
        dsa::OPERATION.set(&mut bytes, code.into());
        dsa::FLAGS.set(&mut bytes, flags.into());
        dsa::RECORD.set(&mut bytes, at[0] & !0x3f);
        let row = descriptor::operation(&bytes, kind).expect("the code is in the table");
        let mut put = |offset: usize, field: &[u8]| {
            // Mostly leaves reserved fields zero.
            let reserved = row.reserved.iter().any(|&(first, last)| first < offset + field.len() && offset <= last);
            if !reserved {
                bytes[offset..offset + field.len()].copy_from_slice(field);
            }
        };
        put(16, &at[1].to_le_bytes());
        put(24, &at[2].to_le_bytes());
        put(32, &(sizes[0] as u32).to_le_bytes());
        match (kind, code) {
            (Kind::Dsa, code::CREATE_DELTA) => {
                put(40, &at[3].to_le_bytes());
                put(48, &(sizes[1] as u32).to_le_bytes());
            }
            (Kind::Dsa, code::DUALCAST) => put(40, &at[3].to_le_bytes()),
            (Kind::Dsa, code::APPLY_DELTA | code::CRC) => put(40, &(sizes[1] as u32).to_le_bytes()),
            (Kind::Iaa, _) => {
                put(48, &(sizes[1] as u32).to_le_bytes());
                if flags >> 16 != 0 {
                    put(40, &at[3].to_le_bytes());
                    put(52, &(sizes[2] as u32).to_le_bytes());
                }
                if code == crate::table::iaa::code::DECOMPRESS {
                    put(38, &[1]);
                }
            }
            _ => {}
        }
        if let Some((at, value)) = noise {
            bytes[at] = value;
        }
        // The processor sets these bits; the device does not check them.
        bytes[..4].fill(0);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_descriptor_has_something_wrong_if_and_only_if_the_model_refuses_it(
        (kind, descriptor) in prop_oneof![Just(Kind::Dsa), Just(Kind::Iaa)]
            .prop_flat_map(|kind| descriptors(kind).prop_map(move |descriptor| (kind, descriptor))),
        in_batch in any::<bool>(),
        later in any::<bool>(),
    ) {
        let in_batch = in_batch && kind == Kind::Dsa;
        let queue = Queue { version: if later { 0x200 } else { 0x100 }, ..queue(kind) };
        let violations = descriptor::check(&descriptor, &queue, in_batch);
        match check(&descriptor, in_batch, &limits(&queue)) {
            Ok(_) => prop_assert!(violations.is_empty(), "{violations:?}"),
            Err(refused) => {
                let reason = violations.iter().any(|wrong| wrong.status == refused.status);
                prop_assert!(reason, "{refused:?} is not among {violations:?}");
            }
        }
    }
}
