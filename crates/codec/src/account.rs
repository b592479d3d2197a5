//! Who encoded, by bytes of content: how a report says it.

use std::fmt::Display;

/// The parts in percent, those of nothing left out, and what went wrong last. None before anything was encoded.
pub(crate) fn words<const N: usize>(parts: [(&str, u64); N], trouble: Option<impl Display>) -> Option<String> {
    let all: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    if all == 0 {
        return None;
    }
    // Little is not nothing, and nearly all is not all.
    let percent = |bytes: u64| match (bytes * 100 + all / 2) / all {
        0 => 1,
        100 if bytes < all => 99,
        percent => percent,
    };
    let some = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
    let shares: Vec<_> = some.map(|(who, bytes)| format!("{who} {} %", percent(bytes))).collect();
    let trouble = trouble.map(|trouble| format!(" (last: {trouble})")).unwrap_or_default();
    Some(format!("{}{trouble}", shares.join(", ")))
}
