//! Huffman codes of limited length.

/// Maximum number of symbols of an alphabet: literals and lengths, with the two that never occur.
pub(super) const MAX_SYMBOLS: usize = 288;

/// Assigns each symbol with a count a code length of at most `limit`, so that the code is complete and (apart from the
/// limit) optimal. Symbols without a count get 0. A single symbol gets length 1.
pub(super) fn code_lengths(counts: &[u32], limit: u8, lengths: &mut [u8]) {
    assert!(counts.len() <= MAX_SYMBOLS && counts.len() == lengths.len() && (1..=15).contains(&limit));
    lengths.fill(0);
    let mut order = [(0_u32, 0_u16); MAX_SYMBOLS];
    let mut used = 0;
    for (symbol, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        order[used] = (*count, symbol as u16);
        used += 1;
    }
    let order = &mut order[..used];
    if used <= 1 {
        order.iter().for_each(|(_, symbol)| lengths[usize::from(*symbol)] = 1);
        return;
    }
    // All symbols must fit at the maximum length.
    assert!(used <= 1 << limit);
    order.sort_unstable();

    let mut per_length = [0_u32; MAX_SYMBOLS];
    for depth in depths(order) {
        per_length[usize::from(depth.min(u16::from(limit)))] += 1;
    }
    shorten(&mut per_length, limit);

    // The rarest symbols get the longest codes.
    let mut rarest_first = order.iter();
    for length in (1..=limit).rev() {
        for (_, symbol) in rarest_first.by_ref().take(per_length[usize::from(length)] as usize) {
            lengths[usize::from(*symbol)] = length;
        }
    }
}

/// Returns the depths of the leaves of a Huffman tree over weights in ascending order, deepest first: the in-place
/// method of Moffat and Katajainen (1995), here on a separate array. The array holds, in turn, weights of inner nodes,
/// indices of their parents, and depths.
fn depths(order: &[(u32, u16)]) -> impl Iterator<Item = u16> + use<> {
    let n = order.len();
    let mut node = [0_u64; MAX_SYMBOLS];
    for (slot, (count, _)) in node.iter_mut().zip(order) {
        *slot = u64::from(*count);
    }
    // Join the two smallest, among leaves without a parent (from `leaf`) and inner nodes without a parent (from
    // `root`).
    let (mut leaf, mut root) = (0, 0);
    for next in 0..n - 1 {
        let mut weight = 0;
        for _ in 0..2 {
            if leaf >= n || (root < next && node[root] < node[leaf]) {
                weight += node[root];
                node[root] = next as u64;
                root += 1;
            } else {
                weight += node[leaf];
                leaf += 1;
            }
        }
        node[next] = weight;
    }
    // Replace parents by depths, from the root down.
    node[n - 2] = 0;
    for inner in (0..n - 2).rev() {
        node[inner] = node[node[inner] as usize] + 1;
    }
    // The nodes of each level that are not inner nodes are leaves.
    let mut leaves = [0_u16; MAX_SYMBOLS];
    let (mut available, mut depth, mut inner, mut at) = (1_usize, 0_u16, n as isize - 2, n);
    while available > 0 {
        let mut here = 0;
        while inner >= 0 && node[inner as usize] == u64::from(depth) {
            here += 1;
            inner -= 1;
        }
        for _ in here..available {
            at -= 1;
            leaves[at] = depth;
        }
        available = 2 * here;
        depth += 1;
    }
    leaves.into_iter().take(n)
}

/// Makes a code complete again whose longest lengths were cut to the limit. While the code is oversubscribed, one
/// symbol moves from the longest length to the level below a shorter symbol, which moves down one level itself.
fn shorten(per_length: &mut [u32; MAX_SYMBOLS], limit: u8) {
    let limit = usize::from(limit);
    let claimed: u64 = (1..=limit).map(|length| u64::from(per_length[length]) << (limit - length)).sum();
    for _ in 1 << limit..claimed {
        per_length[limit] -= 1;
        let shorter =
            (1..limit).rev().find(|length| per_length[*length] > 0).expect("all symbols fit at the maximum length");
        per_length[shorter] -= 1;
        per_length[shorter + 1] += 2;
    }
}

/// Returns the canonical code of each symbol (RFC 1951, section 3.2.2), most significant bit first.
pub(super) fn canonical_codes(lengths: &[u8], codes: &mut [u16]) {
    let mut per_length = [0_u16; 16];
    lengths.iter().filter(|length| **length > 0).for_each(|length| per_length[usize::from(*length)] += 1);
    let mut next = [0_u16; 16];
    for length in 1..16 {
        next[length] = (next[length - 1] + per_length[length - 1]) << 1;
    }
    for (code, length) in codes.iter_mut().zip(lengths) {
        *code = next[usize::from(*length)];
        if *length > 0 {
            next[usize::from(*length)] += 1;
        } else {
            *code = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    #[cfg(not(miri))]
    use proptest::prelude::*;

    use super::*;

    fn lengths_of(counts: &[u32], limit: u8) -> Vec<u8> {
        let mut lengths = vec![0; counts.len()];
        code_lengths(counts, limit, &mut lengths);
        lengths
    }

    /// Returns Kraft's sum in units of the limit: exactly 1 means complete.
    fn kraft(lengths: &[u8], limit: u8) -> u64 {
        lengths.iter().filter(|length| **length > 0).map(|length| 1 << (limit - length)).sum()
    }

    #[test]
    fn nothing_and_one_symbol() {
        assert_eq!(lengths_of(&[0, 0], 15), [0, 0]);
        assert_eq!(lengths_of(&[0, 7, 0], 15), [0, 1, 0]);
        assert_eq!(lengths_of(&[3, 7], 15), [1, 1]);
    }

    #[test]
    fn textbook_weights_give_the_textbook_cost() {
        let counts = [45, 13, 12, 16, 9, 5];
        let lengths = lengths_of(&counts, 15);
        let cost: u32 = counts.iter().zip(&lengths).map(|(count, length)| count * u32::from(*length)).sum();
        assert_eq!(cost, 224);
    }

    #[test]
    fn fibonacci_weights_keep_to_the_limit() {
        let mut counts = vec![1_u32, 1];
        while counts.len() < 40 {
            counts.push(counts[counts.len() - 1].saturating_add(counts[counts.len() - 2]));
        }
        let lengths = lengths_of(&counts, 15);
        assert_eq!(lengths.iter().max(), Some(&15));
        assert_eq!(kraft(&lengths, 15), 1 << 15);
    }

    #[test]
    fn the_canonical_example_of_the_rfc() {
        let mut codes = [0; 8];
        canonical_codes(&[3, 3, 3, 3, 3, 2, 4, 4], &mut codes);
        assert_eq!(codes, [0b010, 0b011, 0b100, 0b101, 0b110, 0b00, 0b1110, 0b1111]);
    }

    #[cfg(not(miri))]
    proptest! {
        #[test]
        fn every_code_is_complete_and_within_the_limit(
            counts in prop::collection::vec(prop_oneof![2 => Just(0_u32), 5 => 1..100_u32, 1 => any::<u32>()], 2..286),
            limit in 9_u8..=15,
        ) {
            let lengths = lengths_of(&counts, limit);
            let used = counts.iter().filter(|count| **count > 0).count();
            for (count, length) in counts.iter().zip(&lengths) {
                prop_assert_eq!(*count > 0, *length > 0);
                prop_assert!(*length <= limit);
            }
            if used > 1 {
                prop_assert_eq!(kraft(&lengths, limit), 1 << limit);
            }
        }

        #[test]
        fn no_more_frequent_symbol_has_a_longer_code(counts in prop::collection::vec(0..1000_u32, 2..286)) {
            let lengths = lengths_of(&counts, 15);
            for (a, la) in counts.iter().zip(&lengths) {
                for (b, lb) in counts.iter().zip(&lengths) {
                    if a > b && *b > 0 {
                        prop_assert!(la <= lb);
                    }
                }
            }
        }

        /// Compares with the definition: repeatedly join the two lightest nodes.
        #[test]
        fn the_cost_is_that_of_a_huffman_tree(counts in prop::collection::vec(1..1000_u32, 2..60)) {
            let lengths = lengths_of(&counts, 15);
            let cost: u64 = counts.iter().zip(&lengths).map(|(count, length)| u64::from(*count) * u64::from(*length)).sum();
            let mut heap: std::collections::BinaryHeap<_> =
                counts.iter().map(|count| std::cmp::Reverse(u64::from(*count))).collect();
            let mut best = 0;
            while heap.len() > 1 {
                let sum = heap.pop().unwrap().0 + heap.pop().unwrap().0;
                best += sum;
                heap.push(std::cmp::Reverse(sum));
            }
            prop_assert_eq!(cost, best);
        }
    }
}
