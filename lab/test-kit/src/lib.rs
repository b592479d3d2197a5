//! What the tests of several crates share.
//!
//! Only `dev-dependencies` name this crate: nothing that ships depends on it, and it knows nothing of migration. What needs a crate of
//! the product is behind a feature.

pub mod checksum;
pub mod content;
pub mod inflate;
#[cfg(feature = "portal")]
pub mod portal;
#[cfg(feature = "qatzip")]
pub mod qatzip;
pub mod random;
pub mod threads;
pub mod tools;

pub use random::Random;
