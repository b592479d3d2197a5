//! Describes for a report which encoders did how much, by bytes of content.

use std::fmt::Display;

/// Returns the parts in percent, without empty ones, and the last error. None before anything was encoded.
pub(crate) fn words<const N: usize>(parts: [(&str, u64); N], trouble: Option<impl Display>) -> Option<String> {
    let all: u64 = parts.iter().map(|(_, bytes)| bytes).sum();
    if all == 0 {
        return None;
    }
    // A small part is not shown as 0 %, and nearly all is not shown as 100 %.
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
