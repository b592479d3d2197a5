//! The results of devices for a batch's pages when it is sent: their checksums, and deltas from the kept pages.
//!
//! The devices got the work a few packets ahead. Since then a kept page may have been replaced, or may have followed a newer packet, so
//! that the result is of no use. So each request carries the number of the packet that had the kept content.

use sterna_offload::Delta;

/// A normal page of a batch, and the kept page that is the base of its delta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct DeltaBase {
    /// The page's number among the normal pages.
    pub(in super::super) number: usize,
    /// The place of the kept page.
    pub(super) at: usize,
    /// The packet that had the kept content.
    pub(super) sequence: u64,
}

/// Which result of a device is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum WrongResult {
    /// A delta does not lead to the page.
    Delta,
    /// A copy does not have the checksum that its device has computed.
    Copy,
}

/// The results of devices.
pub(in super::super) trait DeviceResults {
    /// Returns the CRC-32C of the normal page `number`.
    fn checksum(&self, number: usize) -> Option<u32>;

    /// Returns the delta of the page that was requested as number `item`.
    fn delta(&self, item: usize) -> Option<Delta<'_>>;
}

/// The results for a batch.
#[derive(Clone, Copy)]
pub(super) struct BatchResults<'a> {
    by: &'a dyn DeviceResults,
    /// The deltas that were requested, ascending.
    against: &'a [DeltaBase],
    /// Index of the first of them that was not passed yet.
    item: usize,
}

impl<'a> BatchResults<'a> {
    pub(super) fn checksum(&self, number: usize) -> Option<u32> {
        self.by.checksum(number)
    }

    /// Returns the delta of a page, if it was made against the same kept content. Pages must be passed in ascending order.
    pub(super) fn delta(&mut self, page: DeltaBase) -> Option<Delta<'a>> {
        while self.against.get(self.item).is_some_and(|asked| asked.number < page.number) {
            self.item += 1;
        }
        let asked = self.against.get(self.item)?;
        if *asked == page { self.by.delta(self.item) } else { None }
    }
}

/// The content of a batch's normal pages, and the results of devices for it.
#[derive(Clone, Copy)]
pub(in super::super) struct NormalPages<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) results: Option<BatchResults<'a>>,
}

impl<'a> NormalPages<'a> {
    /// Makes the content `bytes` without results of devices.
    pub(in super::super) fn of(bytes: &'a [u8]) -> Self {
        Self { bytes, results: None }
    }

    /// Makes the content `bytes` with the results of `by`, which has made deltas against `against`.
    pub(in super::super) fn with_results(bytes: &'a [u8], by: &'a dyn DeviceResults, against: &'a [DeltaBase]) -> Self {
        Self { bytes, results: Some(BatchResults { by, against, item: 0 }) }
    }
}

#[cfg(test)]
mod tests {
    use sterna_memory::delta::apply;
    use sterna_wire::delta::PageDeltas;

    use super::super::*;

    /// The results of a device for a batch: the checksums of its pages, and each delta that was requested.
    struct Device {
        checksums: Vec<u32>,
        deltas: Vec<Option<Vec<u8>>>,
    }

    impl DeviceResults for Device {
        fn checksum(&self, number: usize) -> Option<u32> {
            self.checksums.get(number).copied()
        }

        fn delta(&self, item: usize) -> Option<Delta<'_>> {
            Some(match &self.deltas[item] {
                Some(record) if record.is_empty() => Delta::Equal,
                Some(record) => Delta::Record(record),
                None => Delta::TooLong,
            })
        }
    }

    /// Returns the record of these words.
    fn record(words: &[(u16, u64)]) -> Vec<u8> {
        words.iter().flat_map(|(at, word)| [&at.to_le_bytes()[..], &word.to_le_bytes()].concat()).collect()
    }

    /// Returns a delta encoder that keeps the pages `before` from the first on, sent in packet 1.
    fn kept(before: &[u8]) -> (Deltas, [Run; 1]) {
        let mut deltas = Deltas::new(64 * PAGE_SIZE, 16 * PAGE_SIZE);
        let run = [Run { kind: RunKind::Normal, first: 0, count: (before.len() / PAGE_SIZE) as u32 }];
        let costs = deltas.whole(None);
        deltas.split(0, &run, NormalPages::of(before), 0, costs);
        deltas.sent(0, &[], 1, 1);
        (deltas, run)
    }

    /// Sends `now`, with the results of `device`. Returns how the pages were split, and the destination's pages, which were
    /// `before`.
    fn send(deltas: &mut Deltas, runs: &[Run], before: &[u8], now: &[u8], device: &Device) -> (Split, Vec<u8>) {
        let (costs, mut against) = (deltas.whole(None), Vec::new());
        let most = deltas.list_bases(0, runs, costs, &mut against);
        assert_eq!((against.len(), most), (before.len() / PAGE_SIZE, MAX_RECORD));
        let split = deltas.split(0, runs, NormalPages::with_results(now, device, &against), 1, costs);
        deltas.sent(0, &[], 2, 3);
        let mut there = before.to_vec();
        let (runs, records) = deltas.deltas();
        let pages = runs.iter().flat_map(|run| run.first..run.end());
        for (page, delta) in pages.zip(PageDeltas::new(records, split.deltas)) {
            let (delta, page) = (delta.unwrap(), &mut there[page as usize * PAGE_SIZE..][..PAGE_SIZE]);
            apply(delta.record, page).unwrap();
            assert_eq!(crc32c(page), delta.checksum);
        }
        let (runs, mut rest) = deltas.rest(now);
        for page in runs.iter().flat_map(|run| run.first..run.end()) {
            let (content, later) = rest.split_at(PAGE_SIZE);
            there[page as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(content);
            rest = later;
        }
        (split, there)
    }

    #[test]
    fn a_devices_delta_is_sent_only_where_it_leads_to_the_page_and_fits() {
        let before = vec![7; PAGE_SIZE];
        let mut now = before.clone();
        now[8..24].copy_from_slice(&[1u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
        let (right, other) = (record(&[(1, 1), (2, 2)]), u64::from_le_bytes([7; 8]));
        let wrong = Some(WrongResult::Delta);
        // The device's record; whether it is sent, and whether it is wrong.
        let cases = [
            (Some(right.clone()), 1, None),
            // Words that have not changed may be in it.
            (Some(record(&[(1, 1), (2, 2), (511, other)])), 1, None),
            (Some(record(&[(1, 1)])), 0, wrong),
            (Some(record(&[(1, 1), (2, 3)])), 0, wrong),
            (Some(record(&[(1, 1), (2, 2), (9, 9)])), 0, wrong),
            (Some(vec![]), 0, wrong),
            (Some(record(&[(2, 2), (1, 1)])), 0, wrong),
            (Some(record(&[(1, 1), (2, 2), (512, other)])), 0, wrong),
            (Some([right, vec![0]].concat()), 0, wrong),
            // This costs bytes and no more.
            (None, 0, None),
        ];
        for checksums in [vec![], vec![crc32c(&now)]] {
            for (says, goes, expected) in &cases {
                let (mut deltas, runs) = kept(&before);
                let device = Device { checksums: checksums.clone(), deltas: vec![says.clone()] };
                let (split, there) = send(&mut deltas, &runs, &before, &now, &device);
                let is = Split { deltas: *goes, whole: 1 - goes, by_device: *goes, wrong: *expected, same: 0 };
                assert_eq!((split, there == now), (is, true), "{says:?}");
                // The kept page is the destination's.
                let costs = deltas.whole(None);
                let split = deltas.split(0, &runs, NormalPages::of(&now), 3, costs);
                assert_eq!(split, Split { same: 1, ..Split::default() }, "{says:?}");
            }
        }
    }

    #[test]
    fn a_devices_delta_goes_up_to_the_longest_that_pays() {
        let before = vec![7; PAGE_SIZE];
        for (words, goes) in [(MAX_RECORD / 10, 1), (MAX_RECORD / 10 + 1, 0)] {
            let words: Vec<_> = (0..words as u16).map(|at| (at, u64::from(at))).collect();
            let (mut now, record) = (before.clone(), record(&words));
            apply(&record, &mut now).unwrap();
            let (mut deltas, runs) = kept(&before);
            let device = Device { checksums: vec![], deltas: vec![Some(record)] };
            let (split, there) = send(&mut deltas, &runs, &before, &now, &device);
            assert_eq!((split.deltas, split.wrong, there == now), (goes, None, true));
        }
    }

    #[test]
    fn a_devices_delta_against_content_that_is_not_kept_any_more_is_ignored() {
        let (before, now) = (vec![7; PAGE_SIZE], vec![7; PAGE_SIZE]);
        let (mut deltas, runs) = kept(&before);
        let (costs, mut against) = (deltas.whole(None), Vec::new());
        deltas.list_bases(0, &runs, costs, &mut against);
        // The page is sent again meanwhile, and then once more with its first content.
        for (content, packet) in [(vec![8; PAGE_SIZE], 2), (before, 3)] {
            let split = deltas.split(0, &runs, NormalPages::of(&content), packet - 1, costs);
            assert_eq!(split.whole, 1);
            deltas.sent(0, &[], packet, packet);
        }
        let device = Device { checksums: vec![], deltas: vec![Some(record(&[(0, 0)]))] };
        let split = deltas.split(0, &runs, NormalPages::with_results(&now, &device, &against), 3, costs);
        assert_eq!(split, Split { same: 1, ..Split::default() });
    }

    #[test]
    fn pages_go_with_the_checksum_of_what_was_read_and_not_of_a_wrong_copy() {
        let before = vec![7; 4 * PAGE_SIZE];
        let mut read = before.clone();
        read[PAGE_SIZE..3 * PAGE_SIZE].fill(9);
        (read[0], read[3 * PAGE_SIZE]) = (9, 9);
        let checksums: Vec<_> = read.chunks(PAGE_SIZE).map(crc32c).collect();
        let first = u64::from_le_bytes([9, 7, 7, 7, 7, 7, 7, 7]);
        let delta = || Some(record(&[(0, first)]));
        let (mut deltas, runs) = kept(&before);
        let device = Device { checksums: checksums.clone(), deltas: vec![delta(), None, None, delta()] };
        let (split, there) = send(&mut deltas, &runs, &before, &read, &device);
        assert_eq!((split.deltas, split.whole, split.wrong, there == read), (2, 2, None, true));
        assert_eq!(deltas.rest_checksum(), Some(crc32c(&read[PAGE_SIZE..3 * PAGE_SIZE])));

        // The copy of the last page is wrong, and the delta leads to it.
        let mut copy = read.clone();
        copy[4 * PAGE_SIZE - 1] = 8;
        let to_copy = Some(record(&[(0, first), (511, u64::from_le_bytes([7, 7, 7, 7, 7, 7, 7, 8]))]));
        let (mut deltas, runs) = kept(&before);
        let device = Device { checksums, deltas: vec![delta(), None, None, to_copy] };
        let (split, _) = send(&mut deltas, &runs, &before, &copy, &device);
        assert_eq!((split.deltas, split.whole, split.wrong), (1, 3, Some(WrongResult::Copy)));
        assert_eq!(deltas.rest_checksum(), Some(crc32c(&read[PAGE_SIZE..])), "the destination will see");

        // The same where the CPU makes the delta.
        let (mut deltas, runs) = kept(&before);
        let costs = deltas.whole(None);
        assert_eq!(deltas.split(0, &runs, NormalPages::with_results(&copy, &device, &[]), 1, costs).deltas, 2);
        let last = PageDeltas::new(deltas.deltas().1, 2).last().unwrap().unwrap();
        assert_eq!(last.checksum, device.checksums[3]);
    }
}
