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

#[cfg(test)]
mod tests {
    fn is_requested(fault: &str) -> bool {
        std::env::var("STERNA_FAULTY_TEST").is_ok_and(|requested| requested == fault)
    }

    #[test]
    fn a_test_that_fails_on_request_shows_how_the_gate_reports_it() {
        assert!(!is_requested("fail"), "as requested by STERNA_FAULTY_TEST=fail");
    }

    #[test]
    fn a_test_that_hangs_on_request_shows_how_the_gate_ends_it() {
        println!("it hangs if STERNA_FAULTY_TEST=hang");
        while is_requested("hang") {
            std::thread::park();
        }
    }
}
