//! Huge pages for large buffers with random access: one TLB entry then covers two megabytes.

use rustix::mm::{Advice, madvise};

use crate::PAGE_SIZE;

/// Requests huge pages for `bytes`, as far as whole ones fit. The content stays; a kernel without them uses small ones.
pub fn prefer_huge_pages(bytes: &mut [u8]) {
    let start = bytes.as_mut_ptr().align_offset(PAGE_SIZE);
    let length = bytes.len().saturating_sub(start) / PAGE_SIZE * PAGE_SIZE;
    if length > 0 {
        // SAFETY: whole pages of memory that the caller has to itself; this advice changes no content.
        let _ = unsafe { madvise(bytes[start..].as_mut_ptr().cast(), length, Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_buffer_may_be_given_and_keeps_its_content() {
        for length in [0, 1, PAGE_SIZE - 1, PAGE_SIZE, 3 * PAGE_SIZE + 5, 5 << 20] {
            let mut bytes: Vec<u8> = (0..length).map(|at| at as u8).collect();
            prefer_huge_pages(&mut bytes);
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == at as u8));
        }
    }
}
