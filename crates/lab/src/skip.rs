//! How a test says that this machine lacks what it needs.

use crate::Error;

/// The value, or `None` with a line `skipped: …` where the machine lacks what it takes (tools not set up, no root).
///
/// With `STERNA_REQUIRE_TOOLS=1` in the environment, as where everything has been set up, a lack is a failure, but not what
/// `scripts/setup` could not have ([`Error::NotInMirrors`]).
///
/// # Panics
/// On every other error, with the error.
#[track_caller]
pub fn or_skip<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if error.is_absence() && !is_required(&error) => {
            eprintln!("skipped: {error}");
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
    fn what_the_mirrors_lack_is_skipped_also_where_tools_are_required() {
        let error = Error::NotInMirrors { what: "QEMU 11.1".into(), reason: "none there".into() };
        assert!(!is_required(&error) && or_skip::<()>(Err(error)).is_none());
        let required = std::env::var_os("STERNA_REQUIRE_TOOLS").is_some();
        assert_eq!(is_required(&Error::missing("QEMU 10.0", &[])), required);
    }
}
