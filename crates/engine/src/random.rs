//! Random numbers of the kernel, for keys.

use std::io;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Fills `bytes` with random numbers. Opens no file (getrandom(2), Linux 3.17).
///
/// # Errors
/// The kernel returns no random numbers, or a filter forbids the call.
pub(crate) fn fill(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_filled_each_time_with_others() {
        let (mut first, mut second) = ([0; 1000], [0; 1000]);
        fill(&mut first).unwrap();
        fill(&mut second).unwrap();
        assert_ne!(first, second);
        assert!(first.chunks(50).all(|part| part.iter().any(|byte| *byte != 0)));
    }
}
