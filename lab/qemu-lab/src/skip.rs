//! Skips a test if this machine lacks something that the test needs.

use std::io::Write;

use crate::Error;

/// Returns the value, or `None` after printing a line `skipped: …` if the machine lacks something (tools not set up, no root).
///
/// With `STERNA_REQUIRE_TOOLS=1` in the environment, for machines where everything has been set up, this is a failure, except for
/// tools that `scripts/setup` could not get ([`Error::NotInMirrors`]).
///
/// # Panics
/// On every other error, with its text.
#[track_caller]
pub fn skip_if_unavailable<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if error.is_absence() && !is_required(&error) => {
            // Not by a macro: the test harness would keep the line to itself, because the test passes.
            let _ = writeln!(std::io::stderr(), "skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn is_required(error: &Error) -> bool {
    !matches!(error, Error::NotInMirrors { .. }) && std::env::var_os("STERNA_REQUIRE_TOOLS").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_that_the_mirrors_lack_is_skipped_even_if_tools_are_required() {
        let error = Error::NotInMirrors { what: "QEMU 11.1".into(), reason: "none there".into() };
        assert!(!is_required(&error) && skip_if_unavailable::<()>(Err(error)).is_none());
        let required = std::env::var_os("STERNA_REQUIRE_TOOLS").is_some();
        assert_eq!(is_required(&Error::missing("QEMU 10.0", &[])), required);
    }
}
