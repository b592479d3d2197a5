//! The devices seen from outside: 64 bytes in, records and memory out.

mod abi;
mod common;
mod conformance;
mod iaa;
mod operations;
mod process;
mod properties;
mod queues;
mod scripted;
mod timing;
