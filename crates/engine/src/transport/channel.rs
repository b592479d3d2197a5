//! The first exchange on a connection: the channel header, and the answer: acceptance or a refusal with a reason.

use std::io::Write;
use std::time::{Duration, Instant};

use sterna_wire::header::{CHANNEL_HEADER_LENGTH, ChannelHeader, ChannelKind, ChannelReply, REPLY_PREFIX_LENGTH};
use sterna_wire::identity::{MigrationId, MigrationKey, ProofSubject};
use sterna_wire::limits::MAX_TEXT;

use super::connection::classify;
use super::{Connection, Reader, TransportError, Writer};

/// How a TLS connection begins: a handshake record, major version 3 (RFC 8446, section 5.1).
const TLS_HANDSHAKE: [u8; 2] = [22, 3];
/// The answer to a sender with TLS where there is none. The sender can show it, because it arrives before any other answer.
const NO_TLS: &str = "this receiver does not use TLS, and the sender does: use TLS at both sides or at neither";

/// Opens a channel on a connection made by [`Connection::connect`]: sends the channel header, which proves that the
/// channel belongs to the migration, and waits for the answer. Returns the halves, and the round trip from the header
/// to the answer.
///
/// # Errors
/// [`TransportError::Refused`] with the receiver's reason, [`TransportError::Busy`] if the receiver has no room now;
/// TLS's reason if the receiver did not accept the certificate; no answer within the limit; a broken connection.
pub fn open_channel(
    mut connection: Connection,
    key: &MigrationKey,
    id: MigrationId,
    kind: ChannelKind,
    index: u16,
    incarnation: u32,
) -> Result<(Writer, Reader, Duration), TransportError> {
    let peer = connection.peer();
    let limits = connection.limits;
    let exporter = connection.exporter();
    let header = ChannelHeader::new(key, &ProofSubject { id, kind, index, incarnation, exporter });
    let asked = Instant::now();
    let sent = connection.writer.write_all(&header.encode());
    let reply = read_reply(&mut connection.reader, &peer, asked + limits.handshake, &limits);
    match (reply, sent) {
        (Ok(ChannelReply::Accepted), Ok(())) => Ok((connection.writer, connection.reader, asked.elapsed())),
        (Ok(ChannelReply::Refused(reason)), _) => Err(TransportError::Refused { peer, reason }),
        (Ok(ChannelReply::Busy(reason)), _) => Err(TransportError::Busy { peer, reason }),
        // A receiver that refuses may close before it has read the header. Its reason can still be read, and explains
        // more than the failure to write.
        (Err(error @ (TransportError::Tls { .. } | TransportError::Reply { .. })), _) => Err(error),
        (_, Err(error)) => Err(classify(peer, error, "taking the channel header", &limits)),
        (Err(error), Ok(())) => Err(error),
    }
}

fn read_reply(
    reader: &mut Reader,
    peer: &str,
    deadline: Instant,
    limits: &super::Limits,
) -> Result<ChannelReply, TransportError> {
    let failed = |error| classify(peer.to_owned(), error, "answering the channel header", limits);
    let mut prefix = [0; REPLY_PREFIX_LENGTH];
    reader.read_exact_until(&mut prefix, deadline).map_err(failed)?;
    let length = ChannelReply::reason_length(prefix)
        .map_err(|source| TransportError::Reply { peer: peer.to_owned(), source })?;
    let mut reason = [0; MAX_TEXT];
    let reason = &mut reason[..length];
    reader.read_exact_until(reason, deadline).map_err(failed)?;
    Ok(ChannelReply::decode(prefix, reason))
}

/// Reads the header of an accepted connection, before the connection's deadline. The header is well-formed, but its
/// proof is not checked yet: see [`ChannelHeader::belongs`]. A peer that sends anything else has received a refusal
/// when this returns.
///
/// # Errors
/// No header arrives in time, or the peer sends something else.
pub fn read_header(connection: &mut Connection) -> Result<ChannelHeader, TransportError> {
    let peer = connection.peer();
    let mut bytes = [0; CHANNEL_HEADER_LENGTH];
    let arrived = connection.reader.read_exact_until(&mut bytes, connection.deadline);
    arrived.map_err(|error| classify(peer.clone(), error, "sending the channel header", &connection.limits))?;
    ChannelHeader::decode(&bytes).map_err(|source| {
        let reason = if bytes.starts_with(&TLS_HANDSHAKE) { NO_TLS.to_owned() } else { source.to_string() };
        answer(&mut connection.writer, &ChannelReply::Refused(reason));
        TransportError::Header { peer, source }
    })
}

/// Sends the peer that its channel is accepted.
///
/// # Errors
/// The connection is broken.
pub fn accept_channel(mut connection: Connection) -> Result<(Writer, Reader), TransportError> {
    let accepted = connection.writer.write_all(&ChannelReply::Accepted.encode());
    accepted.map_err(|source| TransportError::Broken { peer: connection.peer(), source })?;
    Ok((connection.writer, connection.reader))
}

/// Sends the peer the reason why its channel is refused, and ends the connection. Does not wait for the peer.
pub fn refuse_channel(mut connection: Connection, reason: &str) {
    answer(&mut connection.writer, &ChannelReply::Refused(reason.to_owned()));
}

/// Sends the peer that there is no room for its channel now, and ends the connection. Does not wait for the peer.
pub fn postpone_channel(mut connection: Connection, reason: &str) {
    answer(&mut connection.writer, &ChannelReply::Busy(reason.to_owned()));
}

fn answer(writer: &mut Writer, reply: &ChannelReply) {
    // The connection ends after this answer. If the peer is gone already, no answer is needed.
    if let Err(error) = writer.write_all(&reply.encode()) {
        tracing::debug!(%error, "the refusal did not reach the peer");
    }
}
