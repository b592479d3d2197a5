//! Panics in code that the embedder gives, as errors.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Makes a call. Returns the text of a panic in it as the error.
pub(crate) fn caught<R>(call: impl FnOnce() -> R) -> Result<R, String> {
    // Only the monitor's own state may be left half done; its documentation says what a panic leaves.
    catch_unwind(AssertUnwindSafe(call)).map_err(panic_text)
}

/// Returns the text of a panic.
pub(crate) fn panic_text(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => match panic.downcast::<&str>() {
            Ok(text) => (*text).to_owned(),
            Err(other) => {
                // Dropping something unknown may panic again.
                std::mem::forget(other);
                "the panic has no text".to_owned()
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_panic_is_kept_whatever_its_type() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| panic!("a text")), Err::<(), _>("a text".into()));
        assert_eq!(caught(|| panic!("number {}", 7)), Err::<(), _>("number 7".into()));
        assert_eq!(caught(|| std::panic::panic_any(7)), Err::<(), _>("the panic has no text".into()));
    }
}
