//! The loop of every destination.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use sterna_memory::PAGE_SIZE;
use sterna_wire::control::{ControlMessage, DestinationFigures};
use sterna_wire::reason::Reason;
use sterna_wire::switchover::{
    DestinationAction, DestinationEnd, DestinationEvent, DestinationGuest, DestinationState, Moment, Outcome,
    RecordState, SwitchoverMessage,
};

use super::{DestinationDriver, DestinationOutcome, Lingering};
use crate::control_link::CLOSED_BY_PEER;
use crate::migration::Phase;
use crate::session::{ConnectionEvent, LAST_WORDS, PeerEvent};
use crate::switchover::{Event, QUEUED_EVENTS, Receiving, TICK, cancelled, passed, time_left};

/// Runs a destination from its first actions until the source needs no more answers.
pub fn run_destination<'a, D: DestinationDriver<'a>>(
    driver: &mut D,
    inbox: &Receiver<Event<D::Event>>,
    first: Vec<DestinationAction>,
) -> DestinationOutcome {
    let mut actions = first;
    let mut unlimited = QUEUED_EVENTS;
    loop {
        let mut answers = Vec::new();
        for action in std::mem::take(&mut actions) {
            answers.extend(perform_observed(driver, action));
            if let Some(reason) = driver.kernel().given_up.take() {
                return DestinationOutcome::GivenUp(reason);
            }
        }
        actions.extend(answers.into_iter().flat_map(|answer| driver.kernel().machine.on(answer)));
        if !actions.is_empty() {
            continue;
        }
        if let Some(outcome) = outcome(driver) {
            return outcome;
        }
        report_progress(driver);
        if unlimited > 0
            && let Ok(event) = inbox.try_recv()
        {
            unlimited -= 1;
            actions = translate(driver, event).map(|event| driver.kernel().machine.on(event)).unwrap_or_default();
            continue;
        }
        unlimited = QUEUED_EVENTS;
        if let Some(event) = driver.idle().or_else(|| overdue(driver)) {
            actions = driver.kernel().machine.on(event);
            continue;
        }
        match inbox.recv_timeout(wait(driver)) {
            Ok(event) => {
                if let Some(event) = translate(driver, event) {
                    actions = driver.kernel().machine.on(event);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("the kernel holds a sender"),
        }
    }
}

/// Returns the outcome, once the migration has ended and the source has received that, or its time to reconnect is over.
fn outcome<'a, D: DestinationDriver<'a>>(driver: &mut D) -> Option<DestinationOutcome> {
    if let Some(reason) = driver.kernel().given_up.take() {
        return Some(DestinationOutcome::GivenUp(reason));
    }
    let answer = driver.kernel().last_answer()?;
    let known = driver.kernel().lingering.as_ref().and_then(|lingering| lingering.hang_up_at);
    let hang_up_at = known.unwrap_or_else(|| driver.hang_up_at(&answer));
    driver.kernel().lingering.iter_mut().for_each(|lingering| lingering.hang_up_at = Some(hang_up_at));
    (driver.kernel().settled || passed(hang_up_at)).then_some(DestinationOutcome::Machine(answer.end))
}

fn report_progress<'a, D: DestinationDriver<'a>>(driver: &mut D) {
    let missing = driver.missing_bytes();
    let kernel = driver.kernel();
    if kernel.end().is_some() {
        return;
    }
    let (observer, phase) = (kernel.observer, kernel.phase);
    if let Some(receiving) = driver.receiving() {
        receiving.report_progress(observer, phase, missing);
    }
}

/// Returns the failure where a time limit has passed and this side may still give up, or where the source sent no reason for a broken
/// channel in time.
fn overdue<'a, D: DestinationDriver<'a>>(driver: &mut D) -> Option<DestinationEvent> {
    let interrupted = driver.kernel().machine.is_interrupted();
    if let Some(reason) = driver.kernel().not_back() {
        return Some(driver.kernel().fail(reason));
    }
    if driver.kernel().may_give_up()
        && let Some(reason) = driver.receiving().and_then(|receiving| receiving.overdue(interrupted))
    {
        return Some(driver.kernel().fail(reason));
    }
    driver.kernel().last_words.take_if(|deadline| passed(*deadline))?;
    channels_failed(driver)
}

/// Returns how long the loop may wait for an event.
fn wait<'a, D: DestinationDriver<'a>>(driver: &mut D) -> Duration {
    let progress = driver.receiving().map_or(TICK, |receiving| receiving.time_left());
    let kernel = driver.kernel();
    let hang_up_at = kernel.lingering.as_ref().and_then(|lingering| lingering.hang_up_at);
    let deadlines = [kernel.last_words, kernel.back_by, hang_up_at].into_iter().flatten().map(time_left);
    deadlines.fold(progress.min(TICK), Duration::min)
}

fn perform_observed<'a, D: DestinationDriver<'a>>(
    driver: &mut D,
    action: DestinationAction,
) -> Option<DestinationEvent> {
    tracing::debug!(?action, "switchover");
    let (observer, step) = (driver.kernel().observer, action.step());
    step.iter().for_each(|step| observer.step(Moment::Before, *step));
    let answer = perform(driver, action);
    step.iter().for_each(|step| observer.step(Moment::After, *step));
    answer
}

/// Performs an action. Returns the event that answers it, if that is known at once.
fn perform<'a, D: DestinationDriver<'a>>(driver: &mut D, action: DestinationAction) -> Option<DestinationEvent> {
    match action {
        DestinationAction::WriteRecord(state) => {
            let missing = driver.missing_bytes();
            let kernel = driver.kernel();
            if state == DestinationState::RunningIncomplete {
                kernel.phase = Phase::PostCopy;
                let pages = missing / PAGE_SIZE as u64;
                // `sterna recover` places no pages and does not know how many are missing.
                if pages > 0 {
                    kernel.observer.note(&format!("the guest runs; {pages} pages are still at the source"));
                }
            }
            if matches!(state, DestinationState::Committed | DestinationState::CommittedIncomplete) {
                kernel.decided = Some(Instant::now());
                kernel.phase = Phase::Committed;
            }
            if state == DestinationState::Running {
                watch_first_moment(driver);
            }
            let kernel = driver.kernel();
            Some(match kernel.ledger.write(RecordState::Destination(state), kernel.observer) {
                true => DestinationEvent::RecordWritten,
                false => DestinationEvent::RecordFailed,
            })
        }
        DestinationAction::ClearAutostart => Some(match driver.clear_autostart() {
            Ok(()) => DestinationEvent::AutostartCleared,
            Err(reason) => DestinationEvent::ActionFailed { reason },
        }),
        DestinationAction::AcceptStream => {
            driver.kernel().phase = Phase::Rounds;
            if let Some(welcome) = driver.receiving().and_then(Receiving::open) {
                driver.kernel().peer.send(&ControlMessage::Welcome(welcome));
            }
            let accepted = driver.accept_stream();
            accepted.err().map(|reason| driver.kernel().fail(reason))
        }
        DestinationAction::Send(message) => {
            match &message {
                SwitchoverMessage::Prepared => driver.kernel().prepared = true,
                SwitchoverMessage::Running | SwitchoverMessage::RunningIncomplete => send_figures(driver, &message),
                SwitchoverMessage::MemoryLost(reason) => drop(driver.kernel().abort.raise(reason.clone())),
                _ => {}
            }
            driver.kernel().peer.send(&ControlMessage::Switchover(message));
            None
        }
        DestinationAction::WatchMissingPages => Some(match driver.watch_missing_pages() {
            Ok(()) => DestinationEvent::MissingPagesWatched,
            Err(reason) => driver.kernel().fail(reason.within("post-copy is not possible at the destination")),
        }),
        DestinationAction::RenewChannels => {
            driver.renew_channels();
            if !driver.kernel().machine.began_post_copy() {
                source_is_back(driver);
            }
            None
        }
        DestinationAction::AwaitMemory => {
            driver.await_memory();
            None
        }
        DestinationAction::Cont => {
            end_channels(driver);
            match driver.start_guest() {
                Ok(state) => state.map(|state| guest_is(driver, state)),
                Err(reason) => Some(DestinationEvent::ActionFailed { reason }),
            }
        }
        DestinationAction::AnnounceSelf => {
            driver.guest_started();
            None
        }
        DestinationAction::Quit => {
            driver.kernel().abort.raise(Reason::other("the migration was aborted"));
            Some(match driver.discard() {
                Ok(()) => DestinationEvent::Guest(DestinationGuest::Gone),
                Err(reason) => DestinationEvent::ActionFailed { reason },
            })
        }
        DestinationAction::HangUp => {
            driver.kernel().peer.hang_up();
            None
        }
        DestinationAction::AwaitSource => {
            if driver.kernel().machine.is_interrupted() {
                driver.receiving().into_iter().for_each(|receiving| receiving.interruptions.begin());
                driver.kernel().await_continuation();
            }
            driver.await_source();
            None
        }
        DestinationAction::Leave => {
            driver.kernel().settled = true;
            None
        }
        DestinationAction::Done(end) => {
            if let DestinationEnd::Stuck { reason } = &end {
                driver.kernel().send_failure(reason);
            }
            let now = Instant::now();
            let lingering = Lingering { end: end.clone(), since: now, changed: now, hang_up_at: None };
            driver.kernel().lingering = Some(lingering);
            driver.ended(&end);
            None
        }
    }
}

/// Records that the source is back, which was lost before the decision.
fn source_is_back<'a, D: DestinationDriver<'a>>(driver: &mut D) {
    let lasted = driver.receiving().map_or(Duration::ZERO, |receiving| {
        // Where the source has noticed the loss first.
        receiving.interruptions.begin();
        receiving.interruptions.end()
    });
    let kernel = driver.kernel();
    kernel.back_by = None;
    kernel.observer.note(&format!("the source is back after {:.1} s", lasted.as_secs_f64()));
}

/// Ends the channels before a guest is started with all of its memory, and waits for their threads: no thread writes the memory of a running
/// guest, whatever the source sends after its decision. In post-copy the channels stay, because the source still counts on them: then
/// nothing is placed but missing pages, and nothing is discarded after the totals (`receive::placer`).
fn end_channels<'a, D: DestinationDriver<'a>>(driver: &mut D) {
    if driver.kernel().machine.began_post_copy() {
        return;
    }
    driver.kernel().abort.finish();
    if let Some(receiving) = driver.receiving() {
        receiving.acceptor.join();
    }
}

/// Watches the guest, which runs with all of its memory, before the source receives that and ends its monitor.
fn watch_first_moment<'a, D: DestinationDriver<'a>>(driver: &mut D) {
    let begun = Instant::now();
    let does_not_run = driver.why_not_running();
    if let Some(receiving) = driver.receiving() {
        receiving.figures.watched_ms = begun.elapsed().as_secs_f64() * 1e3;
    }
    if let Some(why) = does_not_run {
        driver.kernel().observer.note(&format!("the guest does not run: {why}"));
        driver.kernel().ledger.amend(|record| record.does_not_run = Some(why));
    }
}

/// Returns the event that the guest is in `state`. Takes the time until it runs, the first time.
fn guest_is<'a, D: DestinationDriver<'a>>(driver: &mut D, state: DestinationGuest) -> DestinationEvent {
    let since = driver.kernel().decided.take_if(|_| state == DestinationGuest::Running);
    if let (Some(since), Some(receiving)) = (since, driver.receiving()) {
        receiving.figures.start_ms = since.elapsed().as_secs_f64() * 1e3;
    }
    DestinationEvent::Guest(state)
}

/// Sends the source the figures that belong to `message`: about this side, and about post-copy once that has ended.
fn send_figures<'a, D: DestinationDriver<'a>>(driver: &mut D, message: &SwitchoverMessage) {
    if *message == SwitchoverMessage::Running
        && let Some(figures) = driver.post_copy_figures()
    {
        driver.kernel().peer.send(&ControlMessage::PostCopyFigures(figures));
    }
    let does_not_run = driver.kernel().ledger.record().does_not_run.clone();
    let figures = driver.receiving().map(|receiving| receiving.figures.clone());
    // `sterna recover` has no figures, and reports such a guest all the same.
    let Some(mut figures) = figures.or_else(|| does_not_run.as_ref().map(|_| DestinationFigures::default())) else {
        return;
    };
    driver.count_figures(&mut figures);
    figures.does_not_run = does_not_run;
    if let Some(receiving) = driver.receiving() {
        receiving.figures.guest_ended.clone_from(&figures.guest_ended);
    }
    driver.kernel().peer.send(&ControlMessage::Figures(figures));
}

/// Handles an event. Returns what it means to the state machine, if anything.
fn translate<'a, D: DestinationDriver<'a>>(driver: &mut D, event: Event<D::Event>) -> Option<DestinationEvent> {
    let kernel = driver.kernel();
    match event {
        Event::Peer(news) => handle_peer(driver, news),
        Event::Broken(incarnation) if incarnation != kernel.data_incarnation => None,
        // Their end was the interruption.
        Event::Broken(_) if kernel.machine.is_interrupted() => None,
        Event::Broken(_) if kernel.abort.was_lost() && kernel.may_give_up() => {
            kernel.last_words = Some(Instant::now() + LAST_WORDS);
            None
        }
        Event::Broken(_) => channels_failed(driver),
        Event::Cancelled => cancel(driver),
        // Only a source has a control.
        Event::Requested => None,
        Event::Own(event) => match driver.handle(event)? {
            DestinationEvent::Guest(state) => Some(guest_is(driver, state)),
            event => Some(event),
        },
    }
}

/// Handles a failure of the data channels. Before this side is prepared, it ends the migration; in post-copy there will be others.
fn channels_failed<'a, D: DestinationDriver<'a>>(driver: &mut D) -> Option<DestinationEvent> {
    let kernel = driver.kernel();
    let reason = kernel.abort.reason()?;
    let lost = kernel.abort.was_lost();
    if lost && kernel.machine.may_be_interrupted() {
        kernel.observer.note(&format!("the channels of the guest's memory failed, and are opened again: {reason}"));
    } else if kernel.may_give_up() {
        let reason = if lost { reason } else { driver.explained(reason) };
        driver.kernel().send_failure(&reason);
        return Some(DestinationEvent::ChannelsLost { reason });
    } else if kernel.lacks_memory() && kernel.peer.is_connected() {
        kernel.observer.note(&format!("the channels of the guest's memory failed, and are made anew: {reason}"));
    }
    Some(DestinationEvent::ChannelsLost { reason })
}

fn handle_peer<'a, D: DestinationDriver<'a>>(driver: &mut D, news: ConnectionEvent) -> Option<DestinationEvent> {
    let kernel = driver.kernel();
    match kernel.peer.handle(news)? {
        PeerEvent::Message(message, _share) => match message {
            ControlMessage::Switchover(message) => {
                kernel.independent |=
                    matches!(message, SwitchoverMessage::Abort(_) | SwitchoverMessage::Outcome(Outcome::Aborted));
                if let SwitchoverMessage::Abort(reason) = &message {
                    kernel.note_end_at_source(reason);
                }
                Some(DestinationEvent::Message(message))
            }
            ControlMessage::Failed(reason) | ControlMessage::Refused(reason) => {
                kernel.note_end_at_source(&reason);
                Some(DestinationEvent::Failed { reason: reason.from_peer().within("the source failed") })
            }
            ControlMessage::Progress(progress) => {
                if let Some(receiving) = driver.receiving() {
                    receiving.source_reports(progress);
                }
                None
            }
            message => driver.receive(message),
        },
        PeerEvent::Lost(reason) => {
            kernel.closed = reason == CLOSED_BY_PEER;
            kernel.link_changed();
            if kernel.phase == Phase::PostCopy && kernel.lacks_memory() {
                kernel.observer.note(&format!(
                    "the source is lost ({reason}) and part of the guest's memory with it: waiting for it to reconnect"
                ));
            } else if kernel.end().is_none() {
                kernel.observer.note(&format!("the connection to the source is lost: {reason}"));
                kernel.abort.lost(format_args!("the source was lost: {reason}"));
            }
            Some(DestinationEvent::ConnectionLost)
        }
        PeerEvent::Connected => {
            // The source gets its full time again to receive the outcome.
            kernel.link_changed();
            if let Some(DestinationEnd::Stuck { reason }) = kernel.end() {
                kernel.send_failure(reason);
            }
            Some(DestinationEvent::Connected)
        }
        PeerEvent::Unreachable(reason) => {
            kernel.observer.note(&format!("a connection was refused: {reason}"));
            None
        }
    }
}

fn cancel<'a, D: DestinationDriver<'a>>(driver: &mut D) -> Option<DestinationEvent> {
    let kernel = driver.kernel();
    if kernel.end().is_some() {
        if driver.cancel_ends_lingering() {
            driver.kernel().stop_lingering();
        }
        return None;
    }
    if kernel.phase == Phase::PostCopy {
        kernel.observer.note("the guest runs here and lacks part of its memory: this cannot be cancelled");
        return None;
    }
    if !kernel.may_give_up() {
        driver.too_late_to_cancel();
        return None;
    }
    kernel.cancelled = true;
    Some(kernel.fail(cancelled()))
}
