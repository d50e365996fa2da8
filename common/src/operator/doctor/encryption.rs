//! Whether the connection to MongoDB is encrypted, as the connection string says.

use std::net::IpAddr;

use mongodb::options::{ClientOptions, ServerAddress, Tls};

use super::{Check, Finding, State};
use crate::base::printable;

/// Whether others in the network can read or change what is sent. `members` are the names that the replica set gives its members.
pub(super) fn finding(options: Option<&ClientOptions>, members: &[String]) -> Finding {
    let Some(options) = options else {
        let text = "the connection is that of the application's own driver, whose settings are not known here";
        return Finding::new(Check::Tls, State::Unknown, text);
    };
    let members = members.iter().filter_map(|member| ServerAddress::parse(member).ok());
    let away = options.hosts.iter().cloned().chain(members).find(|host| !is_this_machine(host));
    let away = away.map(|host| printable(&host.to_string(), 120));
    match (&options.tls, away) {
        (Some(Tls::Enabled(tls)), Some(host)) if tls.allow_invalid_certificates == Some(true) => Finding::warning(
            Check::Tls,
            format!(
                "the certificate of {host} is not checked, so another machine could take its place: remove tlsAllowInvalidCertificates \
                 and tlsInsecure from MONGODB_URI, and write tlsCAFile=FILE"
            ),
        ),
        (Some(Tls::Enabled(_)), _) => Finding::good(Check::Tls, "the connection to MongoDB is encrypted"),
        (_, Some(host)) => Finding::warning(
            Check::Tls,
            format!(
                "the connection to {host} is not encrypted, so others in the network could read jobs: start mongod with \
                 --tlsMode requireTLS, and write tls=true in MONGODB_URI (docs/operating.md, TLS and X.509)"
            ),
        ),
        (_, None) => Finding::good(Check::Tls, "MongoDB is on this machine, and the connection is not encrypted"),
    }
}

/// Whether an address is one of loopback or a socket.
fn is_this_machine(address: &ServerAddress) -> bool {
    let ServerAddress::Tcp { host, .. } = address else { return true };
    host.eq_ignore_ascii_case("localhost") || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_leaves_this_machine_is_encrypted_and_the_server_is_known() {
        let check = async |uri: &str, member: &str, state: State, part: &str| {
            let options = ClientOptions::parse(uri).await.expect(uri);
            let found = finding(Some(&options), &[member.to_owned()]);
            assert!(found.state == state && found.text.contains(part), "{uri} {member}: {found:?}");
        };
        for here in ["127.0.0.1:1", "127.0.0.2", "localhost", "LOCALHOST:27017", "[::1]:27017"] {
            check(&format!("mongodb://{here}"), here, State::Good, "on this machine").await;
            check(&format!("mongodb://{here}"), "db1:27017", State::Warning, "connection to db1:27017 is not encrypted").await;
            check(&format!("mongodb://db1,{here}"), here, State::Warning, "connection to db1:27017 is not encrypted").await;
        }
        check("mongodb://10.0.0.5", "10.0.0.5:27017", State::Warning, "write tls=true").await;
        check("mongodb://db1/?tls=true", "db1:27017", State::Good, "is encrypted").await;
        check("mongodb://db1/?tls=true&tlsInsecure=true", "db1:27017", State::Warning, "is not checked").await;
        check("mongodb://localhost/?tls=true&tlsAllowInvalidCertificates=true", "localhost:1", State::Good, "is encrypted").await;
        assert_eq!(finding(None, &[]).state, State::Unknown);
    }
}
