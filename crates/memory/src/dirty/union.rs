//! Several dirty logs as one: for example KVM's for the vCPUs and a log of reported writes for a device that writes
//! from user space.

use super::{DirtyLog, DirtyLogError};
use crate::bitmap::PageBitmap;

/// A page is dirty if any of the logs names it. All logs number the same RAM blocks in the same way.
pub struct UnionLog {
    logs: Vec<Box<dyn DirtyLog>>,
}

impl UnionLog {
    /// Makes the union of `logs`.
    pub fn new(logs: Vec<Box<dyn DirtyLog>>) -> Self {
        Self { logs }
    }
}

impl DirtyLog for UnionLog {
    fn start(&mut self) -> Result<(), DirtyLogError> {
        for index in 0..self.logs.len() {
            if let Err(error) = self.logs[index].start() {
                for started in &mut self.logs[..index] {
                    // The first error is the one to report, whether or not this log stops.
                    let _ = started.stop();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn found_populated(&mut self, block: usize, populated: &PageBitmap) -> Result<(), DirtyLogError> {
        self.logs.iter_mut().try_for_each(|log| log.found_populated(block, populated))
    }

    fn collect(&mut self, block: usize, dirty: &mut PageBitmap) -> Result<(), DirtyLogError> {
        self.logs.iter_mut().try_for_each(|log| log.collect(block, dirty))
    }

    fn stop(&mut self) -> Result<(), DirtyLogError> {
        // Stops each log, even if another one fails.
        self.logs.iter_mut().map(|log| log.stop()).fold(Ok(()), Result::and)
    }
}
