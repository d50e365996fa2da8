//! TCP addresses at which a leader listens for hints.

use std::{fmt, io::Error, net::IpAddr, str::FromStr};

use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};

use crate::{base::Address, roster::ProcessIdentity};

/// A host, by its name or IP address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HintsAddress(Address);

/// A text is not a [`HintsAddress`].
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a host and a port such as 10.0.0.5:7421, [::1]:7421 or jobs.internal:7421")]
pub struct InvalidHintsAddress(String);

impl FromStr for HintsAddress {
    type Err = InvalidHintsAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self).map_err(|_| InvalidHintsAddress(text.to_owned()))
    }
}

impl fmt::Display for HintsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl HintsAddress {
    /// Listens there. Returns the address at which others can connect: with the actual port if it is 0 here, and with the name of this
    /// machine if the host here stands for all addresses of it.
    pub(crate) async fn listen(&self) -> Result<(TcpListener, Self), Error> {
        let Self(Address { host, port }) = self;
        let listener = TcpListener::bind((host.as_str(), *port)).await?;
        let port = listener.local_addr()?.port();
        let stands_for_all = host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified());
        let host = if stands_for_all { ProcessIdentity::of_this_process()?.hostname } else { host.clone() };
        Ok((listener, Self(Address { host, port })))
    }

    pub(crate) async fn connect(&self) -> Result<TcpStream, Error> {
        let stream = TcpStream::connect((self.0.host.as_str(), self.0.port)).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for text in ["10.0.0.5:7421", "[::1]:0", "jobs.internal:65535", "a_b-c:1", "0.0.0.0:1"] {
            assert_eq!(text.parse::<HintsAddress>().map(|address| address.to_string()).as_deref(), Ok(text));
        }
        for text in ["", ":", ":7421", "host", "host:", "host:65536", "host:-1", "a b:1", "[::1:1", "[host]:1", "http://host:1", "\u{e4}:1"]
        {
            let refused = text.parse::<HintsAddress>();
            assert!(refused.is_err(), "{text:?}: {refused:?}");
        }
    }
}
