//! Requests of other threads while QEMU sends its guest by itself: they become QEMU's downtime limit. The bandwidth's limit is Sterna's own
//! and needs nothing of QEMU.

use std::time::Duration;

use serde_json::json;
use sterna_engine::live_control::RoundsEnd;

use super::driver::Driver;
use super::rounds::RoundsWatch;
use super::{COMMIT_ESTIMATE, MIN_DOWNTIME_LIMIT};
use crate::settings::MAX_DOWNTIME_LIMIT;

impl Driver<'_> {
    /// Returns the target downtime.
    pub(super) fn downtime(&self) -> Duration {
        self.kernel.requests().downtime.unwrap_or(self.options.downtime)
    }

    /// Returns the downtime limit for QEMU: what the target leaves for its last pages; or any, where the guest is to be paused now.
    pub(super) fn downtime_limit(&self) -> Duration {
        match self.kernel.requests().ending {
            Some(RoundsEnd::SwitchOver) => MAX_DOWNTIME_LIMIT,
            _ => self
                .downtime()
                .saturating_sub(self.window.allowance() + COMMIT_ESTIMATE)
                .clamp(MIN_DOWNTIME_LIMIT, MAX_DOWNTIME_LIMIT),
        }
    }

    /// Gives QEMU the downtime limit that was requested, once it has the planned one.
    pub(super) fn carry_out_requests(&mut self) {
        let limit = self.downtime_limit();
        if !self.stage.accepted() || limit == self.limit {
            return;
        }
        let arguments = json!({ "downtime-limit": limit.as_millis() as u64 });
        match self.qmp.execute("migrate-set-parameters", arguments) {
            Ok(_) => {
                (self.limit, self.watch) = (limit, RoundsWatch::new(self.downtime()));
                let text = format!("as requested, QEMU's downtime-limit is {} ms from now on", limit.as_millis());
                self.kernel.observer.note(&text);
            }
            Err(error) => self.kernel.observer.note(&format!("QEMU does not take another downtime-limit: {error}")),
        }
    }

    /// Returns how much longer a step may take where the guest was paused by request, whatever was left.
    pub(super) fn forced_time(&self) -> Duration {
        let forced = self.kernel.requests().ending == Some(RoundsEnd::SwitchOver);
        let predicted = if forced { self.progress.predicted_downtime_ms } else { 0.0 };
        Duration::from_secs_f64((3.0 * predicted / 1e3).clamp(0.0, 1e9))
    }
}
