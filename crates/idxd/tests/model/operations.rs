//! Every operation, by every submission method.

use sterna_idxd::{Descriptor, Status};

use crate::support::*;

#[test]
fn noop_and_drain() {
    for rig in Rig::all() {
        assert_done(&rig.run(Descriptor::noop()), rig.what);
        assert_done(&rig.run(Descriptor::drain()), rig.what);
    }
}

#[test]
fn memmove_also_between_overlapping_buffers() {
    let data = noise(1, 3 * PAGE);
    for rig in Rig::all() {
        let area = Area::new(8);
        area.put(100, &data);
        assert_done(&rig.run(Descriptor::memmove(area.at(100), area.at(5 * PAGE - 7), 9000).to_cache()), rig.what);
        assert_eq!(area.get(5 * PAGE - 7, 9000), data[..9000]);
        assert_done(&rig.run(Descriptor::memmove(area.at(100), area.at(150), 9000)), rig.what);
        assert_eq!(area.get(150, 9000), data[..9000]);
    }
}

#[test]
fn compare_says_where() {
    let data = noise(2, 5000);
    for rig in Rig::all() {
        let area = Area::new(4);
        area.put(0, &data);
        area.put(2 * PAGE, &data);
        let compare = Descriptor::compare(area.at(0), area.at(2 * PAGE), 5000);
        let same = rig.run(compare);
        assert_eq!((same.status, same.result, same.bytes_completed), (Status::Success, 0, 0), "{}", rig.what);
        assert_eq!(rig.run(compare.expecting(0)).status, Status::Success);
        assert_eq!(rig.run(compare.expecting(1)).status, Status::FalsePredicate);
        area.put(2 * PAGE + 4321, &[!data[4321]]);
        let different = rig.run(compare);
        assert_eq!((different.status, different.result, different.bytes_completed), (Status::Success, 1, 4321));
        assert_eq!(rig.run(compare.expecting(0)).status, Status::FalsePredicate);
        assert_eq!(rig.run(compare.expecting(1)).status, Status::Success);
    }
}

#[test]
fn compare_pattern_finds_zero_pages_and_others() {
    for rig in Rig::all() {
        let area = Area::new(2);
        let zero = Descriptor::compare_pattern(area.at(0), 0, 2 * PAGE as u32);
        assert_eq!(rig.run(zero).result, 0, "{}", rig.what);
        area.put(5000, &[1]);
        let different = rig.run(zero.expecting(0));
        assert_eq!((different.status, different.result), (Status::FalsePredicate, 1));
        assert!(different.bytes_completed <= 5000);
        let pattern = 0x0102_0304_0506_0708_u64;
        area.put(0, &pattern.to_le_bytes().repeat(PAGE / 8));
        assert_eq!(rig.run(Descriptor::compare_pattern(area.at(0), pattern, 4093)).result, 0, "not a multiple of 8");
    }
}

#[test]
fn a_delta_made_and_applied_gives_the_second_buffer() {
    let first = noise(3, 2 * PAGE);
    let mut second = first.clone();
    for at in [0, 8, 4095, 8191] {
        second[at] ^= 0xff;
    }
    for rig in Rig::all() {
        let (a, b, record) = (Area::with(&first), Area::with(&second), Area::new(1));
        let create = |capacity| Descriptor::create_delta(a.at(0), b.at(0), 8192, record.at(0), capacity);
        let made = rig.run(create(400).expecting(0b010));
        assert_eq!((made.status, made.result, made.delta_size()), (Status::Success, 1, 40), "{}", rig.what);
        // The offsets are in units of 8 bytes, the data is the second's.
        let bytes = record.get(0, 40);
        let offsets: Vec<u16> = bytes.chunks(10).map(|entry| u16::from_le_bytes([entry[0], entry[1]])).collect();
        assert_eq!(offsets, [0, 1, 4088 / 8, 8184 / 8]);
        assert_eq!(bytes[12..20], second[8..16]);

        assert_done(&rig.run(Descriptor::apply_delta(record.at(0), 40, a.at(0), 8192)), rig.what);
        assert_eq!(a.get(0, 8192), second);
        let same = rig.run(create(400).expecting(0b110));
        assert_eq!((same.status, same.result, same.delta_size()), (Status::FalsePredicate, 0, 0));

        a.put(0, &noise(4, 8192));
        let full = rig.run(create(80));
        assert_eq!((full.status, full.result, full.delta_size(), full.bytes_completed), (Status::Success, 2, 80, 64));
    }
}

#[test]
fn checksums_are_crc32c_and_go_on_from_a_seed() {
    let data = noise(5, 10_000);
    assert_eq!(crc32c(0, b"123456789"), 0xe306_9283, "the test's own");
    for rig in Rig::all() {
        let (source, copy) = (Area::with(&data), Area::new(3));
        let whole = rig.run(Descriptor::crc(source.at(0), 10_000, 0));
        assert_done(&whole, rig.what);
        assert_eq!(whole.crc(), crc32c(0, &data), "{}", rig.what);
        let part = rig.run(Descriptor::crc(source.at(0), 6001, 0)).crc();
        let copied = rig.run(Descriptor::copy_crc(source.at(6001), copy.at(5), 3999, part));
        assert_done(&copied, rig.what);
        assert_eq!(copied.crc(), whole.crc());
        assert_eq!(copy.get(5, 3999), data[6001..]);
    }
}

#[test]
fn what_a_device_refuses_it_refuses_with_the_right_words() {
    for rig in Rig::all() {
        let area = Area::new(2);
        for (descriptor, status) in [
            (Descriptor::memmove(area.at(0), area.at(PAGE), 0), Status::BadSize),
            (Descriptor::memmove(area.at(0), area.at(PAGE), (2 << 20) + 1), Status::BadSize),
            (Descriptor::create_delta(area.at(4), area.at(PAGE), 64, area.at(0), 80), Status::Alignment),
            (Descriptor::create_delta(area.at(0), area.at(PAGE), 64, area.at(200), 79), Status::BadValue),
            (Descriptor::create_delta(area.at(0), area.at(PAGE), 64, area.at(8), 80), Status::Overlap),
            (Descriptor::copy_crc(area.at(0), area.at(8), 64, 0), Status::Overlap),
            (Descriptor::noop().fenced(), Status::BadFlags),
            (Descriptor::memmove(area.at(0), area.at(PAGE), 8).blocking_on_fault(), Status::BadFlags),
        ] {
            let refused = rig.run(descriptor);
            assert_eq!(refused.status, status, "{} {descriptor:?}", rig.what);
            assert!(refused.status.is_rejected());
        }
        assert_eq!(rig.run(Descriptor::noop().fenced()).invalid_flags() & 1, 1);
    }
}
