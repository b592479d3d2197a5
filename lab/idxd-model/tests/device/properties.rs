//! Random operations on random pages, against references of a line or two. proptest prints failing cases and keeps their
//! seeds.

use proptest::prelude::*;
use sterna_idxd_model::memory::PageState;
use sterna_test_kit::checksum::crc32c;

use crate::common::*;

const A: u64 = DATA;
const B: u64 = DATA + 0x4_0000;
const C: u64 = DATA + 0x8_0000;

/// Makes words of two kinds, so that two buffers are equal in most places.
fn content(bytes: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(vec![0_u8, 0, 0, 0, 0, 0, 0, 1]), bytes / 8 + 1)
        .prop_map(move |words| words.iter().flat_map(|&word| [0, word, 0, 0, 0, 0, 0, 0]).take(bytes).collect())
}

/// Chooses which of the first 8 pages are missing.
fn holes() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0..8_u64, 0..3)
}

fn dig(bench: &Bench, base: u64, holes: &[u64], state: PageState) {
    holes.iter().for_each(|page| bench.memory.set(base + 4096 * page, 1, state));
}

fn fill_in(bench: &Bench) {
    bench.memory.set(DATA, 0x10_0000, PageState::Present);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Resumed from every fault as 8.3.4 specifies, the copy is correct whatever the overlap, as through a temporary buffer.
    #[test]
    fn moves_resume_to_the_end(
        data in content(20_000), from in 0..5000_u64, to in 0..5000_u64, size in 1..20_000_u32,
        overlapping in any::<bool>(), holes in holes(), forbidden in any::<bool>(),
    ) {
        let bench = Bench::new(|_| {});
        let destination = if overlapping { A } else { B } + to;
        let (mut source, mut target, mut left) = (A + from, destination, size);
        bench.memory.put(A + from, &data);
        let wanted = data[..size as usize].to_vec();
        let state = if forbidden { PageState::Forbidden } else { PageState::ReadOnly };
        dig(&bench, destination & !0xfff, &holes, state);
        for faults in 0.. {
            let record = bench.run(memmove(RECORDS, source, target, left));
            if record.status == 1 {
                prop_assert_eq!(record.completed, 0);
                break;
            }
            prop_assert!([0x03, 0x83].contains(&record.status), "{:?}", record);
            // Each missing page is mapped once.
            prop_assert!(record.completed < left && faults < 3, "{:?}", record);
            if record.result == 0 {
                source += u64::from(record.completed);
                target += u64::from(record.completed);
            }
            left -= record.completed;
            bench.memory.set(record.fault, 1, PageState::Present);
        }
        prop_assert_eq!(bench.memory.get(destination, size as usize), wanted);
    }

    #[test]
    fn compares_find_the_first_difference_or_the_first_fault(
        first in content(20_000), second in content(20_000), offset in 0..4096_u64, size in 1..20_000_u32, holes in holes(),
    ) {
        let bench = Bench::new(|_| {});
        bench.memory.put(A, &first);
        bench.memory.put(B + offset, &second);
        dig(&bench, B, &holes, PageState::Forbidden);
        let record = bench.run(compare(RECORDS, A, B + offset, size));
        let size = size as usize;
        let difference = (0..size).find(|&at| first[at] != second[at]);
        let fault = (0..size).find(|at| holes.contains(&((offset + *at as u64) / 4096)));
        match (difference, fault) {
            (Some(at), fault) if fault.is_none_or(|fault| at < fault) => {
                prop_assert_eq!((record.status, record.result, record.completed as usize), (1, 1, at));
            }
            (_, Some(at)) => prop_assert_eq!((record.status, record.result, record.completed as usize), (3, 0, at)),
            (_, None) => prop_assert_eq!((record.status, record.result, record.completed), (1, 0, 0)),
        }
    }

    #[test]
    fn compare_pattern_is_never_beyond_the_first_difference(
        data in content(20_000), pattern in prop::sample::select(vec![0_u64, 0x0100]), size in 1..20_000_u32,
        granule in prop::sample::select(vec![1_u32, 8, 32, 64]),
    ) {
        let bench = Bench::new(|device| device.pattern_granule = granule);
        bench.memory.put(A + 3, &data);
        let record = bench.run(compare_pattern(RECORDS, A + 3, pattern, size));
        let words = pattern.to_le_bytes();
        let difference = (0..size as usize).find(|&at| data[at] != words[at % 8]);
        prop_assert_eq!(record.result, u8::from(difference.is_some()));
        let at = difference.unwrap_or(0);
        prop_assert!(record.completed as usize <= at && at < record.completed as usize + granule as usize);
    }

    /// Created in parts, with faults and small records, and applied in parts: source 1 becomes source 2.
    #[test]
    fn deltas_carry_every_difference(
        first in content(16_384), second in content(16_384), limit in 8..200_u32, words in 1..2048_u32,
        holes in holes(), apply_holes in holes(),
    ) {
        let bench = Bench::new(|_| {});
        bench.memory.put(A, &first);
        bench.memory.put(B, &second);
        dig(&bench, B, &holes, PageState::Forbidden);
        let size = words * 8;
        let (mut deltas, mut done) = (Vec::new(), 0_u32);
        while done < size {
            let (one, two) = (A + u64::from(done), B + u64::from(done));
            let record = bench.run(create_delta(RECORDS, one, two, size - done, C, limit * 10));
            prop_assert!([0x01, 0x03].contains(&record.status), "{:?}", record);
            prop_assert!(record.detail.is_multiple_of(10) && record.detail <= limit * 10);
            for delta in bench.memory.get(C, record.detail as usize).chunks(10) {
                // Offsets begin again with each part.
                let offset = u32::from(u16::from_le_bytes([delta[0], delta[1]])) + done / 8;
                deltas.extend((offset as u16).to_le_bytes());
                deltas.extend(&delta[2..]);
            }
            match (record.status, record.result) {
                (1, 0) => { prop_assert_eq!((record.detail, record.completed), (0, 0)); break; }
                (1, 1) => { prop_assert!(record.detail > 0 && record.completed == 0); break; }
                (1, 2) => prop_assert!(record.completed > 0 && record.completed < size - done),
                (_, result) => {
                    prop_assert_eq!(result, u8::from(record.detail > 0));
                    bench.memory.set(record.fault, 1, PageState::Present);
                }
            }
            done += record.completed;
        }
        dig(&bench, A, &apply_holes, PageState::ReadOnly);
        bench.memory.put(C, &deltas);
        let mut applied = 0;
        while applied < deltas.len() as u32 {
            let left = deltas.len() as u32 - applied;
            let record = bench.run(apply_delta(RECORDS, C + u64::from(applied), left, A, size));
            if record.status == 1 {
                break;
            }
            prop_assert_eq!(record.status, 0x83);
            prop_assert_eq!(record.completed % 10, 0);
            applied += record.completed;
            bench.memory.set(record.fault, 1, PageState::Present);
        }
        fill_in(&bench);
        let wanted = [&second[..size as usize], &first[size as usize..]].concat();
        prop_assert_eq!(bench.memory.get(A, first.len()), wanted);
    }

    #[test]
    fn crcs_resume_with_the_partial_value(data in content(20_000), size in 1..20_000_u32, holes in holes()) {
        let bench = Bench::new(|_| {});
        bench.memory.put(A, &data);
        dig(&bench, A, &holes, PageState::Forbidden);
        let (mut done, mut seed) = (0, 0);
        let value = loop {
            let at = u64::from(done);
            let record = bench.run(copy_crc(RECORDS, A + at, B + at, size - done, seed));
            if record.status == 1 {
                break record.detail;
            }
            prop_assert_eq!(record.status, 0x03);
            if record.completed > 0 {
                seed = record.detail;
            }
            done += record.completed;
            bench.memory.set(record.fault, 1, PageState::Present);
        };
        prop_assert_eq!(value, crc32c(0, &data[..size as usize]));
        prop_assert_eq!(bench.memory.get(B, size as usize), &data[..size as usize]);
    }

    /// Any 64 bytes lead to one completion or one software error, and never to a panic.
    #[test]
    fn any_descriptor_ends_in_one_report(bytes in prop::collection::vec(any::<u8>(), 64), plausible in any::<bool>()) {
        let bench = Bench::new(|device| device.version = 0x200);
        let mut raw = Raw([0; 64]);
        raw.0.copy_from_slice(&bytes);
        raw.0[..4].fill(0);
        if plausible {
            raw.0[7] %= 0x12;
            let flags = [raw.0[4] & 0xc, raw.0[5] & 1, 0];
            raw.0[4..7].copy_from_slice(&flags);
            raw.0[38..].fill(0);
            raw = raw.u64(8, RECORDS).u64(16, A).u64(24, B).u32(32, u32::from_le_bytes([bytes[32], bytes[33], 0, 0]));
        }
        bench.memory.put(RECORDS, &[0; 32]);
        bench.submit(raw);
        bench.model.settle();
        prop_assert_eq!(bench.queue.in_flight(), 0);
        let asked = raw.0[4] & 0xc == 0xc;
        let reported = bench.record(RECORDS).status != 0 || bench.model.counters().software_errors > 0;
        prop_assert!(reported || !asked);
    }

    /// Descriptors that mostly pass the checks of the table, with addresses from everywhere, at memory of any content
    /// (so that lists, delta records, codes and states are of any content, too).
    #[test]
    fn any_addresses_and_any_content_end_in_one_report(
        iaa in any::<bool>(), operation in 0..16_usize, flags in any::<u32>(), extra in any::<u16>(),
        addresses in prop::array::uniform5(prop::sample::select(vec![
            A, A + 0x40, B, B + 8, C, 0, !0, !0x1f, !0x3f, !0xfff, 1 << 63, 0x1000,
        ])),
        sizes in prop::array::uniform3(prop::sample::select(vec![0_u32, 1, 2, 8, 80, 100, 1568, 4096, 5376, 0x8000, !0])),
        content in prop::collection::vec(any::<u8>(), 600), ats_disable in any::<bool>(),
    ) {
        const DSA: [u8; 13] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0x10, 0x11, 0x20];
        const IAA: [u8; 5] = [0, 2, 0x42, 0x43, 0x44];
        let bench = Bench::new(|device| {
            if iaa {
                *device = sterna_idxd_model::DeviceConfig::iaa();
            }
            (device.version, device.queues[0].block_on_fault) = (0x200, true);
            device.queues[0].ats_disable = ats_disable;
        });
        for base in [A, B, C] {
            bench.memory.put(base, &content);
        }
        let code = if iaa { IAA[operation % IAA.len()] } else { DSA[operation % DSA.len()] };
        let [one, two, three, four, record] = addresses;
        let allowed = if iaa { 0x5f_2102 } else { 0x07_2182 };
        // A record most of the time where the test can see it.
        let raw = Raw::new(code, if flags >> 30 == 0 { record } else { RECORDS }).flags(flags & allowed);
        let raw = if code == 0 || code == 2 { raw } else { raw.u64(16, one).u64(24, two).u32(32, sizes[0]) };
        let raw = match (iaa, code) {
            (true, 0x42 | 0x43) => raw.u64(40, three).u32(48, sizes[1]).u32(52, sizes[2])
                .u8(38, extra as u8).u8(39, (extra >> 8) as u8 & 3),
            (true, 0x44) => raw.u64(24, 0).u64(56, four),
            (false, 5 | 6) => raw.u8(40, extra as u8),
            (false, 7) => raw.u64(40, three).u32(48, sizes[1]).u8(56, extra as u8),
            (false, 8 | 0x10 | 0x11) => raw.u32(40, sizes[1]),
            (false, 9) => raw.u64(40, three),
            _ => raw,
        };
        bench.submit(raw);
        bench.model.settle();
        prop_assert_eq!(bench.queue.in_flight(), 0, "{:02x?}", raw.0);
    }

    /// Batches of copies, compares and faults, with and without fences, in every order of the seed.
    #[test]
    fn batches_count_and_abandon_by_their_fences(
        members in prop::collection::vec((0..3_u8, any::<bool>()), 2..20), seed in any::<u64>(),
    ) {
        let bench = Bench::with_seed(seed, |_| {});
        bench.memory.put(B, &[1; 64]);
        let raws: Vec<Raw> = members.iter().enumerate().map(|(index, &(kind, fence))| {
            let record = member_record(index);
            let raw = match kind {
                0 => memmove(record, A, C + 64 * index as u64, 64),
                1 => compare_pattern(record, B, 0, 64).flags(CHECK),
                _ => memmove(record, A, 0x10, 64),
            };
            raw.flags(if fence { FENCE } else { 0 })
        }).collect();
        let record = bench.run_batch(&raws);
        let expected = [1, 2, 0x83];
        let abandoned = (0..members.len())
            .find(|&at| members[at].1 && members[..at].iter().any(|&(kind, _)| kind != 0))
            .unwrap_or(members.len());
        let failed = members[..abandoned].iter().any(|&(kind, _)| kind != 0);
        prop_assert_eq!((record.status, record.completed as usize), (if failed { 5 } else { 1 }, abandoned));
        for (index, &(kind, _)) in members.iter().enumerate() {
            let status = if index < abandoned { expected[usize::from(kind)] } else { 0 };
            prop_assert_eq!(bench.member(index).status, status, "member {}", index);
        }
    }
}
