import { render } from "preact";
import { useEffect } from "preact/hooks";
import { apiKey, loadModels } from "./api";
import { ChatView } from "./chat";
import { ImagesView } from "./images";
import { LivePanel } from "./live/live";
import { ReferenceView } from "./reference";
import { route, Shell } from "./shell";
import { RequestDialog } from "./snippets";
import "./style.css";
import "./views.css";

function View() {
  if (location.pathname.endsWith("/docs")) return <ReferenceView key={apiKey.value} />;
  if (route.value.startsWith("/live")) return <LivePanel />;
  if (route.value.startsWith("/images")) return <ImagesView />;
  return <ChatView />;
}

function Page() {
  useEffect(() => void loadModels(), []);
  return (
    <Shell>
      <View />
      <RequestDialog />
    </Shell>
  );
}

const place = document.getElementById("page");
if (place) render(<Page />, place);
