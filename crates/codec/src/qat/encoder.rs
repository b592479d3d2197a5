//! A channel's encoder: pieces of a batch go to the workers, their members come back in order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_qatzip::{Buffer, Bytes, Channel, Completion, Failure, Job, Reason, Work};

use super::account::Account;
use super::{JOBS, PIECE, Trouble};
use crate::libdeflate::Compressor;
use crate::rest::Rest;
use crate::{CodecError, Encoded, Encoder, check_len, worthwhile};

pub(super) struct QatEncoder {
    channel: Channel,
    /// Buffers for input and result of each job. Missing ones are with the workers, or in `early`.
    idle: Vec<(Buffer, Buffer)>,
    /// Pieces of this batch that were done before their turn.
    early: Vec<Completion>,
    /// None where software is forbidden.
    cpu: Option<Compressor>,
    patience: Duration,
    account: Arc<Account>,
    batch: u64,
    rest: Rest,
}

/// A batch in progress.
struct Pieces<'a> {
    all: std::slice::Chunks<'a, u8>,
    /// How many have been submitted; they are numbered from 0.
    out: u64,
    /// No more are accepted.
    closed: bool,
    /// No error has occurred yet.
    trusted: bool,
}

/// The result for a member.
enum Member {
    Written(usize),
    /// There is no room for it, or no encoder may make it.
    None,
}

impl QatEncoder {
    pub(super) fn new(
        channel: Channel,
        idle: Vec<(Buffer, Buffer)>,
        cpu: Option<Compressor>,
        patience: Duration,
        account: Arc<Account>,
    ) -> Self {
        let (early, rest) = (Vec::with_capacity(JOBS), Rest::default());
        Self { channel, idle, early, cpu, patience, account, batch: 0, rest }
    }

    /// Returns a number that distinguishes a piece from those of other batches, some of which may complete late.
    fn tag(&self, piece: u64) -> u64 {
        self.batch << 32 | piece
    }

    fn keep(&mut self, done: Completion) {
        if let (Bytes::Pinned(input), Bytes::Pinned(output)) = (done.input, done.output) {
            self.idle.push((input, output));
        }
    }

    /// Submits as many pieces as there are buffers for.
    fn submit(&mut self, pieces: &mut Pieces<'_>) {
        while pieces.trusted
            && !pieces.closed
            && pieces.all.len() > 0
            && let Some((mut input, output)) = self.idle.pop()
        {
            let content = pieces.all.next().expect("looked at above");
            input.fill(content);
            let (tag, room) = (self.tag(pieces.out), usize::MAX);
            let job = Job { tag, work: Work::Compress, input: input.into(), output: output.into(), room };
            match self.channel.submit(job) {
                Ok(()) => pieces.out += 1,
                Err(refused) => {
                    let Job { tag, input, output, .. } = refused.job;
                    self.keep(Completion { tag, result: Err(Failure::ShutDown), input, output });
                    pieces.closed = true;
                    // A queue full of other work is no trouble: the CPU helps out.
                    if !matches!(refused.reason, Reason::Full | Reason::ChannelFull) {
                        self.troubled(&mut pieces.trusted, refused.reason.into());
                    }
                }
            }
        }
    }

    /// Returns a submitted piece, once it is done; none if that takes too long.
    fn taken(&mut self, piece: u64, patience: Duration) -> Option<Completion> {
        let tag = self.tag(piece);
        if let Some(at) = self.early.iter().position(|done| done.tag == tag) {
            return Some(self.early.swap_remove(at));
        }
        let deadline = Instant::now() + patience;
        loop {
            let done = self.channel.wait(deadline)?;
            match done.tag {
                this if this == tag => return Some(done),
                this if this >> 32 == self.batch => self.early.push(done),
                _ => self.keep(done),
            }
        }
    }

    /// Returns the member that QATzip has made of a piece; none if it has not.
    fn by_qatzip(&mut self, piece: u64, content: usize, trusted: &mut bool, room: &mut [u8]) -> Option<Member> {
        // After one late piece, others are collected but not waited for.
        let patience = if *trusted { self.patience } else { Duration::ZERO };
        let Some(done) = self.taken(piece, patience) else {
            self.troubled(trusted, Trouble::Late(self.patience));
            return None;
        };
        let member = match done.result {
            Ok(by) => {
                self.account.done(by.by, content);
                let member = room.get_mut(..done.output.len());
                Some(member.map_or(Member::None, |member| {
                    member.copy_from_slice(&done.output);
                    Member::Written(member.len())
                }))
            }
            // A device that was not used is not at fault.
            Err(Failure::TooSmall { .. }) => None,
            Err(failure) => {
                self.troubled(trusted, failure.into());
                None
            }
        };
        self.keep(done);
        member
    }

    fn troubled(&mut self, trusted: &mut bool, trouble: Trouble) {
        if std::mem::take(trusted) {
            self.account.trouble(trouble);
            self.rest.begin();
        }
    }

    fn by_cpu(&mut self, content: &[u8], room: &mut [u8]) -> Member {
        let Some(cpu) = &mut self.cpu else { return Member::None };
        self.account.by_cpu(content.len());
        cpu.gzip(content, room).map_or(Member::None, Member::Written)
    }
}

impl Encoder for QatEncoder {
    fn encode(&mut self, input: &[u8], output: &mut [u8]) -> Result<Encoded, CodecError> {
        check_len(input.len())?;
        let room = worthwhile(input.len(), output.len());
        if room == 0 {
            return Ok(Encoded::Incompressible);
        }
        self.batch += 1;
        while let Some(done) = self.early.pop().or_else(|| self.channel.poll()) {
            self.keep(done);
        }
        let size = input.len().div_ceil(input.len().div_ceil(PIECE));
        let mut pieces = Pieces { all: input.chunks(size), out: 0, closed: false, trusted: !self.rest.goes_on() };
        let asked = pieces.trusted;
        let mut written = 0;
        for (number, piece) in (0..).zip(input.chunks(size)) {
            self.submit(&mut pieces);
            let room = &mut output[written..room];
            let by_qatzip =
                if number < pieces.out { self.by_qatzip(number, piece.len(), &mut pieces.trusted, room) } else { None };
            if by_qatzip.is_none() && self.cpu.is_none() {
                self.account.not_encoded(input.len());
                return Ok(Encoded::Incompressible);
            }
            match by_qatzip.unwrap_or_else(|| self.by_cpu(piece, room)) {
                Member::Written(bytes) => written += bytes,
                Member::None => return Ok(Encoded::Incompressible),
            }
        }
        if asked && pieces.trusted {
            self.rest.went_well();
        }
        Ok(Encoded::Shrunk(written))
    }
}
