//! Tests whose outcome depends on the moment, or on the machine's speed: `make soak` runs them, `make test` does not (.config/nextest.toml).

mod aborted;
mod accelerated;
mod kills;
mod other_hands;
mod slowed_down;
