//! The devices seen from outside: 64 bytes in, records and memory out.

mod common;
mod iaa;
mod inflate;
mod operations;
mod process;
mod queues;
