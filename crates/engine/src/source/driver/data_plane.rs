//! The source's data plane: the channels, the thread of the rounds over them, and the deadline until the guest is paused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_memory::dirty::DirtyLog;
use sterna_memory::normal_page_ratio::NormalPageRatio;
use sterna_wire::header::ChannelKind;
use sterna_wire::reason::{ErrorKind, Reason};

use super::{Driver, Event};
use crate::batch::BatchPool;
use crate::cancel::Cancel;
use crate::cpu_time;
use crate::entry::{PageSearch, Pipeline};
use crate::migration::{Phase, RESUME, RETRANSMIT};
use crate::pacer::Pacer;
use crate::panics;
use crate::send::{DeltaSetting, SendChannel, SendContext};
use crate::session::SessionError;
use crate::source::convergence::Convergence;
use crate::source::rounds::{
    Connections, Controlled, CurrentRound, Held, Order, Progressed, RoundEvent, Rounds, no_pages,
};
use crate::state::{Part, StateWriter};
use crate::switchover::{SourceDriver, after};

/// Batches that wait for each channel or are being filled for it. They only list pages, whose content has not been read yet.
const BATCHES_PER_CHANNEL: usize = 4;
/// How long the round under way may go on when the rounds' time is over.
const ROUND_GRACE: Duration = Duration::from_secs(1);

/// The data plane.
#[derive(Debug)]
pub(super) struct Moving {
    pub(super) pipeline: Arc<Pipeline>,
    /// Carries the monitor's state, once.
    pub(super) stream: Option<Arc<SendChannel>>,
    /// Carry the state of devices, where such channels were chosen.
    pub(super) device_channels: Arc<Vec<SendChannel>>,
    /// The thread of the rounds, until it was joined.
    pub(super) rounds: Option<RoundsThread>,
}

/// The thread of the rounds. It returns the rounds where they have not come to an end of their own.
pub(super) type RoundsThread = (Sender<Order>, JoinHandle<Option<Rounds>>);

impl Moving {
    /// Sends an order to the thread of the rounds. Where that thread has ended, its last message has the reason.
    pub(super) fn order(&self, order: Order) {
        if let Some((orders, _)) = &self.rounds {
            let _ = orders.send(order);
        }
    }

    /// Waits for the thread of the rounds, which has ended or is being taken down. Returns the rounds, with their log on, where they have not come to
    /// an end of their own.
    pub(super) fn join_rounds(&mut self) -> Option<Rounds> {
        let (orders, thread) = self.rounds.take()?;
        drop(orders);
        // A panic there has been printed.
        thread.join().ok().flatten()
    }

    /// As [`Moving::join_rounds`], and stops the log.
    pub(super) fn end_rounds(&mut self) {
        self.join_rounds().into_iter().for_each(Rounds::end);
    }
}

impl Driver<'_> {
    /// Opens the channels, sends the state that is saved ahead, and starts the rounds.
    pub(super) fn begin_rounds(&mut self) -> Result<(), Reason> {
        self.phase = Phase::Rounds;
        if self.moving.is_some() {
            return Err(Reason::other("the rounds were begun already"));
        }
        let ram = self.ram.clone();
        self.progress.total_bytes = ram.bytes();
        let context = self.send_context();
        let pipeline = self.open_ram_channels(&context, Some(self.kernel.cancel))?;
        let stream = self.open_stream(&context)?;
        let device_channels = self.open_device_channels(&context)?;
        self.start_devices(&pipeline, &device_channels, &stream)?;
        let mut ahead = StateWriter::new(&stream, Part::Ahead, self.kernel.session.packet_size);
        let inside = self.occupied.enter(&self.kernel.abort);
        let failed = |error| Reason::new(ErrorKind::Monitor, format_args!("saving state ahead failed: {error}"));
        let saved = self.vmm.save_ahead(&mut ahead).map_err(failed);
        let finished = saved.and_then(|()| ahead.finish().map_err(Reason::other));
        drop(inside);
        let ahead = finished.map_err(|error| self.kernel.abort.reason().unwrap_or(error))?;
        if ahead == 0 {
            self.monitor_loaded_ahead();
        }

        // State that was loaded ahead, or by a device, cannot be loaded again.
        self.resumable = self.kernel.session.has(RESUME) && ahead == 0 && self.devices.known.is_empty();
        let state_size = self.vmm.state_size().map_err(|error| Reason::new(ErrorKind::Monitor, error))?;
        let convergence =
            Convergence::new(self.settings.downtime, self.settings.not_converging, self.settings.give_up_after);
        let rounds = Rounds {
            log: Box::new(self.log.clone()),
            search: PageSearch::new(Arc::clone(&pipeline), ram.clone(), self.kernel.session.packet_size),
            current: CurrentRound::new(&ram),
            pending: no_pages(&ram),
            progressed: Progressed::NotTracking,
            ram,
            convergence,
            state_size,
            devices: Arc::clone(&self.devices.known),
            started: self.started,
            orders: channel().1,
            news: Box::new(|_| {}),
            totals: None,
            stats: Arc::clone(&self.stats),
            unsent: Arc::clone(&self.unsent),
            refusals: Arc::clone(&self.refusals),
            refusals_noted: 0,
            accelerator: self.accelerator.clone(),
            written: self.accelerator.iter().flat_map(|_| no_pages(&self.ram)).collect(),
            may_stop: self.may_stop(),
            control: Controlled::new(self.kernel.control.clone()),
            held: Held::default(),
            retries: 0,
            waited_for_saving: Duration::ZERO,
            abort: Arc::clone(&self.kernel.abort),
        };
        let thread = self.start_rounds(rounds, &pipeline)?;
        self.moving = Some(Moving { pipeline, stream: Some(stream), device_channels, rounds: Some(thread) });
        self.kernel.due = self.rounds_due();
        self.kernel.set_resumable(self.resumable);
        Ok(())
    }

    /// Starts the thread of the rounds over the channels of `pipeline`, which are those of the current incarnation.
    fn start_rounds(&self, mut rounds: Rounds, pipeline: &Arc<Pipeline>) -> Result<RoundsThread, Reason> {
        let (orders, orders_out) = channel();
        let (events, incarnation) = (self.kernel.events.clone(), self.kernel.data_incarnation());
        let panicked = events.clone();
        rounds.go_on_with(Connections {
            pipeline: Arc::clone(pipeline),
            orders: orders_out,
            news: Box::new(move |news| {
                events.send(Event::Rounds(incarnation, news));
            }),
            totals: self.kernel.peer.sender(),
            may_stop: self.may_stop(),
            abort: Arc::clone(&self.kernel.abort),
        });
        let mut log = self.log.clone();
        let run = move || {
            // Reported, because the driver waits for messages of this thread.
            catch_unwind(AssertUnwindSafe(|| rounds.run())).unwrap_or_else(|panic| {
                // The first error is the one to report.
                let _ = log.stop();
                let text = panics::panic_text(panic);
                let reason = Reason::other(format_args!("the thread of the rounds panicked: {text}"));
                panicked.send(Event::Rounds(incarnation, RoundEvent::Failed(reason)));
                None
            })
        };
        let thread = std::thread::Builder::new().name("rounds".into());
        match cpu_time::spawn(thread, run) {
            Ok(thread) => Ok((orders, thread)),
            Err(error) => {
                // It may be on; the first error is the one to report.
                let _ = self.log.clone().stop();
                Err(Reason::other(format_args!("no thread for the rounds: {error}")))
            }
        }
    }

    /// Ends the channels of a destination that is lost, and keeps the rounds: the guest's writes are tracked on, and everything that was not
    /// acknowledged is dirty again.
    pub(super) fn keep_rounds(&mut self) -> Result<(), Reason> {
        self.kernel.abort.lost("the destination is lost");
        if let Some(mut rounds) = self.moving.as_mut().and_then(Moving::join_rounds) {
            rounds.hold();
            self.held_rounds = Some(rounds);
        }
        self.end_data_plane();
        if self.held_rounds.is_none() {
            return Err(Reason::other("the rounds had ended when the destination was lost"));
        }
        // Nothing is sent, and settling slows it down again.
        self.guest_stays();
        self.kernel.due = self.rounds_due();
        Ok(())
    }

    /// Opens channels to the destination, which is connected again and has kept what was acknowledged, and goes on with the rounds.
    ///
    /// # Errors
    /// The channels cannot be opened. The rounds are still held.
    pub(super) fn reopen_channels(&mut self) -> Result<(), Reason> {
        self.kernel.renew_channels();
        self.occupied.renew(self.kernel.data_incarnation());
        self.window.reopen(self.kernel.session.round_trip);
        self.pacer = Arc::new(Pacer::new(self.settings.bandwidth));
        self.kernel.pace_by(&self.pacer);
        let context = self.send_context();
        let pipeline = self.open_ram_channels(&context, Some(self.kernel.cancel))?;
        // Joined with these channels where another one cannot be opened.
        let moving = Moving { pipeline, stream: None, device_channels: Arc::default(), rounds: None };
        let pipeline = Arc::clone(&self.moving.insert(moving).pipeline);
        let stream = self.open_stream(&context)?;
        let Some(rounds) = self.held_rounds.take() else { return Err(Reason::other("no rounds are held")) };
        let thread = self.start_rounds(rounds, &pipeline)?;
        if let Some(moving) = &mut self.moving {
            (moving.stream, moving.rounds) = (Some(stream), Some(thread));
        }
        self.kernel.due = self.rounds_due();
        Ok(())
    }

    /// Ends the rounds, whose channels have ended or are being taken down.
    pub(super) fn end_rounds(&mut self) {
        self.moving.iter_mut().for_each(Moving::end_rounds);
        self.held_rounds.take().into_iter().for_each(Rounds::end);
    }

    /// Returns the deadline of the rounds: when their time is over, or when a byte of the guest must have moved. Between two rounds
    /// the thread of the rounds gives up by itself, with the reason; this deadline ends a round that lasts too long.
    pub(super) fn rounds_due(&self) -> Option<(Instant, &'static str)> {
        let over = self.settings.give_up_after.map(|time| {
            let left = time.saturating_sub(self.started.elapsed());
            (after(left.saturating_add(ROUND_GRACE)), "sending the guest's memory (time limit)")
        });
        // Without a destination nothing moves.
        let stalled = self.settings.limits.stall.filter(|_| self.held_rounds.is_none());
        let stalled = stalled.map(|time| (after(time), "waiting for anything of the guest to move (stall limit)"));
        [over, stalled].into_iter().flatten().min_by_key(|(deadline, _)| *deadline)
    }

    /// Moves the deadline of the rounds where bytes of the guest have moved.
    pub(super) fn watch_progress(&mut self) {
        let moved = (self.sent().wire_bytes, self.window.in_flight());
        if moved != self.moved {
            self.moved = moved;
            self.await_progress();
        }
    }

    /// Sets the deadline of the rounds anew. Other limits hold once the guest is being paused, in post-copy, and where the migration is
    /// being taken down.
    pub(super) fn await_progress(&mut self) {
        let rounds = self.phase == Phase::Rounds && self.moving.is_some();
        if rounds && self.kernel.moments.pausing.is_none() && !self.kernel.abort.is_over() {
            self.kernel.due = self.rounds_due();
        }
    }

    pub(super) fn send_context(&self) -> SendContext {
        SendContext {
            normal_page_ratio: NormalPageRatio::new(self.settings.normal_page_ratio),
            // Not in post-copy: a page that was lost with a connection must be sent again although it is the same.
            hash_key: (!self.kernel.post_copy_begun()).then(|| self.hash_key.clone()),
            window: Arc::clone(&self.window),
            pacer: Arc::clone(&self.pacer),
            abort: Arc::clone(&self.kernel.abort),
            compression: self.compression.clone(),
            rules: self.kernel.session.rules(),
            accelerator: self.accelerator.clone(),
            refusals: self.kernel.session.has(RETRANSMIT).then(|| Arc::clone(&self.refusals)),
            // More than all of RAM and some spare places is of no use, and might not be available.
            deltas: DeltaSetting::AllBlocks {
                cache: self.settings.delta_cache.min(self.ram.bytes().saturating_add(self.ram.bytes() / 8)) as usize
                    / usize::from(self.kernel.session.channels),
            },
            arrivals: Some(Arc::clone(&self.devices.known) as _),
            keeps_pages: self.kernel.session.has(RESUME) && !self.kernel.post_copy_begun(),
        }
    }

    /// Opens the stream channel of this incarnation.
    fn open_stream(&self, context: &SendContext) -> Result<Arc<SendChannel>, Reason> {
        let context = SendContext { keeps_pages: false, ..context.clone() };
        let stream = self.kernel.session.open(self.security, self.kernel.to(), ChannelKind::DeviceState, 0, &context);
        Ok(Arc::new(stream.map_err(SessionError::into_reason)?))
    }

    /// Opens the RAM channels of this incarnation and returns the pipeline over them. Without a `cancel` this cannot be cancelled.
    pub(super) fn open_ram_channels(
        &self,
        context: &SendContext,
        cancel: Option<&Cancel>,
    ) -> Result<Arc<Pipeline>, Reason> {
        let never = Cancel::new();
        let cancel = cancel.unwrap_or(&never);
        let channels = self.kernel.session.open_ram_channels(self.security, self.kernel.to(), context, cancel);
        let channels = channels.map_err(SessionError::into_reason)?;
        let pool = BatchPool::new(BATCHES_PER_CHANNEL * channels.len(), 0);
        let (window, pacer) = (Arc::clone(&self.window), Arc::clone(&self.pacer));
        let pipeline = Pipeline {
            channels,
            pool: Arc::clone(&pool),
            window: Arc::clone(&window),
            page_size: sterna_memory::PAGE_SIZE,
        };
        self.kernel.abort.on_end(move || {
            pacer.release();
            window.close();
            pool.close();
        });
        Ok(Arc::new(pipeline))
    }

    /// Waits for the threads of the data plane, whose connections are closed, and keeps its figures.
    pub(super) fn end_data_plane(&mut self) {
        self.sent_before = self.sent();
        if let Some(mut moving) = self.moving.take() {
            moving.end_rounds();
            self.post_copy.join_server();
            self.end_devices();
            // The threads that shared these channels have ended.
            let stream = moving.stream.and_then(Arc::into_inner);
            let of_devices = Arc::into_inner(moving.device_channels).unwrap_or_default();
            stream.into_iter().chain(of_devices).for_each(SendChannel::join);
            if let Ok(pipeline) = Arc::try_unwrap(moving.pipeline) {
                pipeline.channels.into_iter().for_each(SendChannel::join);
            }
        }
    }
}
