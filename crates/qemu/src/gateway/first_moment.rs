//! Whether a guest that was started at the destination executes there. QEMU's `running` does not show that: it is also the state of a guest whose
//! CPU lacks what the guest uses, and that fails at once.

use std::time::Duration;

use serde_json::json;
use sterna_wire::switchover::ProcessIdentity;

use super::qemu;
use crate::qmp::{FirstMoment, Qmp};

/// How long QEMU may take to answer: the source waits meanwhile. A QEMU that waits for its storage counts as one whose guest may run.
const ANSWER_TIME: Duration = Duration::from_millis(500);

/// Watches the guest in its first moment, and returns why it certainly does not run, for people: a clause about the guest. None of a guest that
/// may run, also if it waits for an interrupt, has shut itself down, or was stopped by another program.
pub(super) fn why_not_running(qmp: &Qmp, process: Option<ProcessIdentity>) -> Option<String> {
    match qmp.watch_first_moment() {
        FirstMoment::Failed(failure) => Some(failure.to_string()),
        // QEMU closes its monitor when it exits, also after the guest has shut down.
        FirstMoment::Closed if qemu::ended_by_itself(qmp).is_some() || !qemu::has_ended(process) => None,
        FirstMoment::Closed => {
            let how = qemu::guest_end(qmp).map_or_else(|| "its output says why".to_owned(), |end| end.what);
            Some(format!("its QEMU has ended at once ({how})"))
        }
        FirstMoment::Passed => {
            let state = qmp.execute_within("query-status", json!({}), ANSWER_TIME).ok()?;
            let cannot_execute = "QEMU cannot execute it (internal-error: its output says why)";
            (state["status"] == "internal-error").then(|| cannot_execute.to_owned())
        }
    }
}
