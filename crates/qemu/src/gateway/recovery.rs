//! `sterna recover` (filled in next).
use super::{Cancel, GatewayError, Observer, RecoverOptions};

/// Settles a migration.
///
/// # Errors
/// Always, for now.
pub fn recover(_: &RecoverOptions, _: &Cancel, _: &dyn Observer) -> Result<String, GatewayError> {
    Err(GatewayError("not here".into()))
}
