//! How a test says that this machine lacks what it needs.

use crate::Error;

/// The value, or `None` with a line `skipped: …` where the machine lacks what it takes (tools not set up, no root).
///
/// With `STERNA_REQUIRE_TOOLS=1` in the environment, as where everything has been set up, a lack is a failure.
///
/// # Panics
/// On every other error, with the error.
#[track_caller]
pub fn or_skip<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if error.is_absence() && std::env::var_os("STERNA_REQUIRE_TOOLS").is_none() => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}
