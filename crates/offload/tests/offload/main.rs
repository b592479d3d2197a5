//! Operations on pages by the software model of the devices and by the CPU: results, faults, shares, endings.

mod answers;
mod behaviour;
mod continued;
mod deltas_to_copies;
mod endings;
mod ledger_file;
mod ledger_orders;
mod model;
mod queues;
mod random;
mod replay;
mod replay_mutations;
mod shares;
mod support;
