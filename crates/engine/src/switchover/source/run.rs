//! The loop of every source.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use sterna_wire::control::ControlMessage;
use sterna_wire::reason::{ErrorKind, Reason};
use sterna_wire::switchover::{
    Moment, RecordState, SourceAction, SourceEnd, SourceEvent, SourceGuest, SourceState, SwitchoverMessage,
};

use super::{SourceDriver, Unserved};
use crate::session::{ConnectionEvent, LAST_WORDS, PeerEvent};
use crate::switchover::{Event, QUEUED_EVENTS, TICK, after, cancelled, passed, time_left};
use crate::vmm::GuestEnd;

/// Returns the reason of a step that was not done in time.
pub(crate) fn too_long(step: &str, waiting_for: Option<String>) -> Reason {
    let more = waiting_for.map(|what| format!("; waiting for {what}")).unwrap_or_default();
    Reason::new(ErrorKind::TimeLimit, format_args!("{step} took too long{more}"))
}

/// Runs a source from its first actions to its end.
pub fn run_source<'a, D: SourceDriver<'a>>(
    driver: &mut D,
    inbox: &Receiver<Event<D::Event>>,
    first: Vec<SourceAction>,
) -> SourceEnd {
    let mut next_tick = Instant::now() + TICK;
    let mut actions = first;
    let mut unlimited = QUEUED_EVENTS;
    loop {
        let mut answers = Vec::new();
        for action in std::mem::take(&mut actions) {
            match action {
                SourceAction::Done(end) => return end,
                action => answers.extend(perform_observed(driver, action)),
            }
        }
        for answer in answers {
            actions.extend(feed(driver, answer));
        }
        if !actions.is_empty() {
            continue;
        }
        if unlimited > 0
            && let Ok(event) = inbox.try_recv()
        {
            unlimited -= 1;
            actions = translate(driver, event).map(|event| feed(driver, event)).unwrap_or_default();
            continue;
        }
        unlimited = QUEUED_EVENTS;
        let event = driver.kernel().gives_up().or_else(|| overdue(driver));
        if let Some(event) = event {
            actions = feed(driver, event);
            continue;
        }
        let wake = driver.kernel().last_words.map_or(next_tick, |deadline| deadline.min(next_tick));
        match inbox.recv_timeout(time_left(wake)) {
            Ok(event) => {
                if let Some(event) = translate(driver, event) {
                    actions = feed(driver, event);
                }
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() < next_tick => {}
            Err(RecvTimeoutError::Timeout) => {
                next_tick = Instant::now() + TICK;
                driver.tick();
                if driver.kernel().machine.undecided() {
                    let end = driver.guest_end().filter(|end| end.by_itself).map(|end| reason_of(&end));
                    if let Some(reason) = end.or_else(|| driver.changed_by_others()) {
                        actions = feed(driver, SourceEvent::Failed { reason });
                    }
                }
            }
            Err(RecvTimeoutError::Disconnected) => unreachable!("the kernel holds a sender"),
        }
    }
}

/// Passes an event to the machine and returns the machine's actions. A cancellation that was accepted is in time, although its event may
/// still be queued: instead of the decision the machine gets the cancellation.
fn feed<'a, D: SourceDriver<'a>>(driver: &mut D, event: SourceEvent) -> Vec<SourceAction> {
    let event = explained(driver, event);
    let kernel = driver.kernel();
    if kernel.machine.decides_at(&event) && kernel.control.decide().is_err() {
        kernel.cancelled = true;
        return kernel.machine.on(SourceEvent::Failed { reason: cancelled() });
    }
    kernel.machine.on(event)
}

/// Returns `event`; where it is a failure before the decision that follows from the end of the guest, the failure that names this end. A guest
/// that has ended by itself stays here, even if its monitor has ended with it: no copy of it may run.
fn explained<'a, D: SourceDriver<'a>>(driver: &mut D, event: SourceEvent) -> SourceEvent {
    use SourceEvent as E;
    if !driver.kernel().machine.undecided() {
        return event;
    }
    let failed = match &event {
        E::Guest(SourceGuest::Gone) => None,
        E::Failed { reason } | E::ActionFailed { reason } | E::ChannelsLost { reason } => Some(reason.kind),
        _ => return event,
    };
    let mut end = driver.guest_end().filter(|end| end.by_itself);
    // A failure may be noticed before its cause is. Whatever else stops the guest is the end of it only with its monitor.
    let follows = !matches!(failed, Some(ErrorKind::Cancelled | ErrorKind::OtherSide | ErrorKind::TimeLimit));
    if end.is_none() && follows && (failed.is_none() || driver.monitor_has_ended()) {
        end = driver.guest_end();
    }
    driver.kernel().guest_end.clone_from(&end);
    match end {
        // The destination may have the only copy of a guest whose monitor something else has ended.
        Some(end) if end.by_itself || failed.is_some() => E::Failed { reason: reason_of(&end) },
        _ => event,
    }
}

fn reason_of(end: &GuestEnd) -> Reason {
    match end.by_itself {
        true => Reason::new(ErrorKind::GuestEnded, &end.what),
        false => Reason::new(ErrorKind::Monitor, &end.what).within("the source's monitor has ended"),
    }
}

/// Returns the guest's state after an abort, unless the guest has ended by itself: that guest stays here and is not resumed.
fn after_abort<'a, D: SourceDriver<'a>>(driver: &mut D, state: Result<SourceGuest, Reason>) -> SourceEvent {
    let gone = state == Ok(SourceGuest::Gone);
    match (driver.guest_end(), state) {
        (Some(end), _) if end.by_itself => {
            driver.kernel().guest_end = Some(end);
            SourceEvent::Guest(SourceGuest::Running)
        }
        (end, state) => {
            driver.kernel().guest_end = end.filter(|_| gone);
            state.map_or_else(|reason| SourceEvent::ActionFailed { reason }, SourceEvent::Guest)
        }
    }
}

/// Returns the failure, where a step took too long or the destination sent no reason for a broken channel in time.
fn overdue<'a, D: SourceDriver<'a>>(driver: &mut D) -> Option<SourceEvent> {
    let kernel = driver.kernel();
    if let Some((_, step)) = kernel.due.take_if(|(deadline, _)| passed(*deadline)) {
        // The reason of the alarm explains more than that the step took long.
        let alarm = kernel.abort.reason();
        return Some(SourceEvent::Failed { reason: alarm.unwrap_or_else(|| too_long(step, driver.waiting_for())) });
    }
    kernel.last_words.take_if(|deadline| passed(*deadline))?;
    Some(SourceEvent::ChannelsLost { reason: kernel.abort.reason()? })
}

fn perform_observed<'a, D: SourceDriver<'a>>(driver: &mut D, action: SourceAction) -> Option<SourceEvent> {
    tracing::debug!(?action, "switchover");
    let (observer, step) = (driver.kernel().observer, action.step());
    step.iter().for_each(|step| observer.step(Moment::Before, *step));
    let answer = perform(driver, action);
    step.iter().for_each(|step| observer.step(Moment::After, *step));
    answer
}

/// Performs an action. Returns the event that answers it, if that is known at once.
fn perform<'a, D: SourceDriver<'a>>(driver: &mut D, action: SourceAction) -> Option<SourceEvent> {
    let failed = |reason| SourceEvent::ActionFailed { reason };
    let state_of = |outcome: Result<SourceGuest, Reason>| outcome.map_or_else(failed, SourceEvent::Guest);
    match action {
        SourceAction::WriteRecord(state) => Some(write_record(driver, state)),
        SourceAction::StartMigration => driver.start_migration().err().map(|reason| {
            let kernel = driver.kernel();
            // The event of the cancellation may still be queued.
            kernel.cancelled |= kernel.cancel.is_cancelled();
            failed(reason)
        }),
        SourceAction::HoldRounds => {
            let kernel = driver.kernel();
            kernel.interruptions.begin();
            kernel.observer.note(&format!(
                "the guest runs on and its writes are tracked; the destination is dialled for {:.0} s",
                kernel.limits.retry.as_secs_f64()
            ));
            driver.hold_rounds().err().map(failed)
        }
        SourceAction::ContinueRounds => continue_rounds(driver),
        SourceAction::StartPostCopy => driver.start_post_copy().err().map(failed),
        SourceAction::ServePages => match driver.serve_pages().err()? {
            Unserved::ConnectionLost(reason) => {
                tracing::info!(%reason, "the rest of memory cannot be sent yet");
                driver.kernel().abort.lost(reason);
                driver.kernel().peer.hang_up();
                Some(SourceEvent::ConnectionLost)
            }
            Unserved::MonitorGone => Some(SourceEvent::Guest(SourceGuest::Gone)),
            Unserved::NoPages(reason) => Some(SourceEvent::GaveUp { reason }),
        },
        SourceAction::Send(message) => {
            driver.kernel().peer.send(&ControlMessage::Switchover(message));
            None
        }
        SourceAction::RelayShut => match driver.complete() {
            Ok(state) => state.map(SourceEvent::Guest),
            Err(reason) => Some(failed(reason)),
        },
        SourceAction::EndMigration => {
            let ended = driver.end_migration();
            Some(after_abort(driver, ended))
        }
        SourceAction::Cont => {
            let resumed = driver.resume();
            Some(after_abort(driver, resumed))
        }
        SourceAction::AnnounceSelf => {
            driver.guest_stays();
            None
        }
        SourceAction::EndGuest => {
            let ended = driver.end_guest();
            driver.kernel().left = ended.as_ref().err().map(Reason::to_string);
            Some(state_of(ended))
        }
        SourceAction::Connect => {
            let kernel = driver.kernel();
            kernel.peer.hang_up();
            if kernel.machine.is_interrupted() {
                // Of one interruption only, however often a connection fails at once.
                kernel.give_up.get_or_insert(after(kernel.limits.retry));
            } else if kernel.decided() {
                if kernel.start_by.is_none() && kernel.give_up.is_none() {
                    // In a recovery.
                    kernel.begin_awaiting();
                }
                kernel.await_delivery();
            } else {
                kernel.give_up.get_or_insert(after(kernel.limits.abort));
            }
            kernel.reconnect();
            None
        }
        SourceAction::Done(_) => unreachable!("the loop handles the end"),
    }
}

fn continue_rounds<'a, D: SourceDriver<'a>>(driver: &mut D) -> Option<SourceEvent> {
    let Err(reason) = driver.continue_rounds() else {
        let kernel = driver.kernel();
        kernel.give_up = None;
        let lasted = kernel.interruptions.end().as_secs_f64();
        kernel.observer.note(&format!("the destination is back after {lasted:.1} s: what it lacks is sent on"));
        return None;
    };
    let kernel = driver.kernel();
    // The event of the cancellation may still be queued.
    kernel.cancelled |= kernel.cancel.is_cancelled();
    let connection = matches!(reason.kind, ErrorKind::ConnectionLost | ErrorKind::Network | ErrorKind::Refused);
    if kernel.cancelled || !connection {
        return Some(SourceEvent::ActionFailed { reason });
    }
    tracing::info!(%reason, "the channels to the destination cannot be opened yet");
    kernel.abort.lost(reason);
    kernel.peer.hang_up();
    Some(SourceEvent::ConnectionLost)
}

fn write_record<'a, D: SourceDriver<'a>>(driver: &mut D, state: SourceState) -> SourceEvent {
    let kernel = driver.kernel();
    if state == SourceState::Aborted {
        // Before the channels are closed, so that the destination learns the reason. Sending waits for nothing: the guest may be paused.
        let reason = kernel.machine.reason().clone();
        kernel.peer.send(&ControlMessage::Failed(reason.clone()));
        kernel.abort.raise(reason);
        kernel.give_up = None;
    }
    if !kernel.ledger.write(RecordState::Source(state), kernel.observer) {
        return SourceEvent::RecordFailed;
    }
    kernel.due = None;
    if state == SourceState::Committed {
        kernel.moments.decided = Some(Instant::now());
        kernel.begin_awaiting();
    }
    SourceEvent::RecordWritten
}

/// Handles an event. Returns what it means to the state machine, if anything.
fn translate<'a, D: SourceDriver<'a>>(driver: &mut D, event: Event<D::Event>) -> Option<SourceEvent> {
    match event {
        Event::Peer(news) => handle_peer(driver, news),
        Event::Broken(incarnation) if incarnation != driver.kernel().data_incarnation => None,
        // Their end was the interruption.
        Event::Broken(_) if driver.kernel().machine.is_interrupted() => None,
        Event::Broken(_) => channels_failed(driver),
        Event::Cancelled => cancel(driver),
        Event::Requested => {
            driver.handle_requests();
            None
        }
        Event::Own(event) => driver.handle(event),
    }
}

/// Handles the failure of the data channels. Before the decision, where only a connection broke, first waits for the destination's reason.
fn channels_failed<'a, D: SourceDriver<'a>>(driver: &mut D) -> Option<SourceEvent> {
    let kernel = driver.kernel();
    if kernel.abort.was_lost() && !kernel.decided() {
        kernel.last_words = Some(Instant::now() + LAST_WORDS);
        return None;
    }
    let reason = kernel.abort.reason()?;
    if kernel.decided() && kernel.post_copy_begun() {
        // The machine connects anew, and no event of the old control channel is handled after that.
        kernel.observer.note(&format!("the connection to the destination is lost: {reason}"));
        if driver.monitor_has_ended() {
            return Some(SourceEvent::Guest(SourceGuest::Gone));
        }
    }
    Some(SourceEvent::ChannelsLost { reason })
}

fn handle_peer<'a, D: SourceDriver<'a>>(driver: &mut D, news: ConnectionEvent) -> Option<SourceEvent> {
    let event = driver.kernel().peer.handle(news)?;
    if let PeerEvent::Message(ControlMessage::Switchover(SwitchoverMessage::Running), _) = &event
        && driver.kernel().decided()
    {
        let unsent = driver.unsent_pages();
        if unsent > 0 {
            return Some(driver.kernel().dispute_running(unsent));
        }
    }
    if let PeerEvent::Message(ControlMessage::Failed(failure), _) = &event
        && !driver.kernel().decided()
        && let Some(reason) = driver.changed_by_others()
    {
        driver.kernel().observer.note(&format!("the destination failed: {failure}"));
        return Some(SourceEvent::Failed { reason });
    }
    let kernel = driver.kernel();
    match event {
        PeerEvent::Message(message, _share) => match message {
            ControlMessage::Switchover(message) => {
                match message {
                    SwitchoverMessage::Prepared => kernel.moments.prepared = Some(Instant::now()),
                    SwitchoverMessage::RunningIncomplete => {
                        kernel.moments.running.get_or_insert_with(Instant::now);
                    }
                    SwitchoverMessage::Running => kernel.moments.runs_complete(),
                    _ => {}
                }
                Some(SourceEvent::Message(message))
            }
            ControlMessage::Failed(reason) | ControlMessage::Refused(reason) => kernel.destination_failed(reason),
            ControlMessage::Figures(figures) => {
                kernel.note_first_moment(&figures);
                driver.receive(ControlMessage::Figures(figures))
            }
            message => driver.receive(message),
        },
        PeerEvent::Lost(reason) => {
            kernel.observer.note(&format!("the connection to the destination is lost: {reason}"));
            kernel.abort.lost(format_args!("the destination was lost: {reason}"));
            Some(SourceEvent::ConnectionLost)
        }
        PeerEvent::Connected => {
            kernel.reconnection.redial.connected();
            if kernel.post_copy_begun() {
                // The destination is waited for without a limit as long as it is there.
                kernel.give_up = None;
            } else if kernel.decided() {
                // It is there again, and may still be starting the guest.
                kernel.await_start();
            }
            Some(SourceEvent::Connected)
        }
        PeerEvent::Unreachable(reason) => {
            tracing::info!(reason, "the destination cannot be reached yet");
            kernel.reconnect();
            None
        }
    }
}

fn cancel<'a, D: SourceDriver<'a>>(driver: &mut D) -> Option<SourceEvent> {
    let kernel = driver.kernel();
    if kernel.machine.may_stop() && !kernel.decided() {
        kernel.give_up = Some(Instant::now());
        return None;
    }
    kernel.cancelled = true;
    if !kernel.decided() {
        return Some(SourceEvent::Failed { reason: cancelled() });
    }
    // In post-copy the rest is still sent, but the source does not wait for a lost destination.
    if !kernel.serves_pages() {
        driver.too_late_to_cancel();
        driver.kernel().await_delivery();
    } else if kernel.peer.is_connected() {
        kernel.observer.note("too late to cancel: the rest of the guest's memory is being sent after it");
    } else {
        kernel.await_delivery();
    }
    None
}
