//! `sterna proxy` (filled in next).
use super::{Cancel, GatewayError, Observer, ProxyReceiveOptions, ProxySendOptions};

/// Source.
///
/// # Errors
/// Always, for now.
pub fn proxy_send(_: &ProxySendOptions, _: &Cancel, _: &dyn Observer) -> Result<(), GatewayError> {
    Err(GatewayError("not here".into()))
}

/// Destination.
///
/// # Errors
/// Always, for now.
pub fn proxy_receive(_: &ProxyReceiveOptions, _: &Cancel, _: &dyn Observer) -> Result<(), GatewayError> {
    Err(GatewayError("not here".into()))
}
